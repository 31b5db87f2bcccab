//! API keys.

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Instant;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, Method, StatusCode, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use sha2::{Digest, Sha256};
use subtle::{ConditionallySelectable, ConstantTimeEq};

use crate::accounts::Account;
use crate::app::App;
use crate::error::ApiError;
use crate::keys::{ApiKey, RateLimits};
use crate::page;
use crate::request_id::RequestId;

/// Who sent the request in hand.
#[derive(Clone)]
pub(crate) struct Origin {
    pub(crate) request_id: String,
    pub(crate) caller: Arc<Account>,
}

/// The keys that open the server; they can be exchanged while it runs.
pub(crate) struct Keys(RwLock<Arc<Table>>);

/// Digests of keys and whose they are. Comparing digests takes the same time whatever was sent, and no key stays in
/// memory in the clear.
struct Table {
    keys: Vec<([u8; 32], Arc<Account>)>,
    /// The one that opens everything.
    admin: Option<([u8; 32], Arc<Account>)>,
    /// Whoever sends no key, where none is needed.
    anybody: Arc<Account>,
}

impl Keys {
    pub(crate) fn new(keys: &[ApiKey], admin: Option<&str>) -> Self {
        let account =
            |name: &str, admin| Arc::new(Account::new(name.to_owned(), admin, RateLimits::default()));
        let table = Table {
            keys: keys_with_accounts(keys, &[]),
            admin: admin.map(|secret| (digest(secret.as_bytes()), account("admin", true))),
            anybody: account("anybody", false),
        };
        Self(RwLock::new(Arc::new(table)))
    }

    /// Takes other keys from now on. Who keeps a name and its limits keeps what was used of them.
    pub(crate) fn replace(&self, keys: &[ApiKey]) {
        let old = self.table();
        let (admin, anybody) = (old.admin.clone(), Arc::clone(&old.anybody));
        let table = Table { keys: keys_with_accounts(keys, &old.keys), admin, anybody };
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(table);
    }

    /// Whether anybody may use the server.
    pub(crate) fn is_open(&self) -> bool {
        self.table().keys.is_empty()
    }

    fn table(&self) -> Arc<Table> {
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Whose key `presented` is.
    fn holder(&self, presented: Option<&[u8]>) -> Option<Arc<Account>> {
        let table = self.table();
        let known = presented.and_then(|presented| table.find(&digest(presented)));
        known.or_else(|| table.keys.is_empty().then(|| Arc::clone(&table.anybody)))
    }
}

impl Table {
    /// Looks at all keys in any case.
    fn find(&self, presented: &[u8; 32]) -> Option<Arc<Account>> {
        const NONE: u32 = u32::MAX;
        let mut found = NONE;
        for (index, (key, _)) in self.keys.iter().chain(&self.admin).enumerate() {
            found.conditional_assign(&(index as u32), key.ct_eq(presented));
        }
        let (_, account) = self.keys.iter().chain(&self.admin).nth(found as usize)?;
        Some(Arc::clone(account))
    }
}

fn digest(secret: &[u8]) -> [u8; 32] {
    Sha256::digest(secret).into()
}

/// Every key with its holder: one of `old` where name and limits are the same.
fn keys_with_accounts(keys: &[ApiKey], old: &[([u8; 32], Arc<Account>)]) -> Vec<([u8; 32], Arc<Account>)> {
    let holder = |(index, key): (usize, &ApiKey)| {
        let name = key.name.clone().unwrap_or_else(|| format!("key-{}", index + 1));
        let is_it = |account: &&Arc<Account>| account.name == name && account.limits() == key.limits;
        let known = old.iter().map(|(_, account)| account).find(is_it).cloned();
        let account = known.unwrap_or_else(|| Arc::new(Account::new(name, false, key.limits)));
        (digest(key.secret.as_bytes()), account)
    };
    keys.iter().enumerate().map(holder).collect()
}

/// Finds out who asks. Answers 401 to everything but the open paths when there are keys and the request has none of
/// them, 403 where only the admin's key will do.
pub(crate) async fn require_key(State(app): State<Arc<App>>, mut request: Request, next: Next) -> Response {
    let holder = app.keys.holder(presented_key(request.headers()));
    let path = request.uri().path();
    let open = request.method() == Method::OPTIONS || is_open_path(path);
    let caller = match holder {
        Some(caller) if caller.admin || !is_admin_path(path) => caller,
        Some(_) => return needs_admin(&app, path).into_response(),
        None if open => Arc::clone(&app.keys.table().anybody),
        None => return unauthorized(request.headers()).into_response(),
    };
    let request_id = request.extensions().get::<RequestId>().map(|RequestId(id)| id.clone());
    let request_id = request_id.unwrap_or_default();
    request.extensions_mut().insert(Origin { request_id, caller: Arc::clone(&caller) });
    let mut response = next.run(request).await;
    caller.show(Instant::now(), response.headers_mut());
    response
}

/// What touches everybody's work.
fn is_admin_path(path: &str) -> bool {
    matches!(path, "/flush_cache")
}

fn needs_admin(app: &App, path: &str) -> ApiError {
    let message = match app.options.admin_key {
        Some(_) => format!("{path} needs the admin's key"),
        None => format!("{path} needs an admin's key and this server has none: see --admin-key"),
    };
    ApiError::new(StatusCode::FORBIDDEN, message).with_code("admin_key_needed").closing()
}

/// What says nothing about anybody's work: the server's health and version, the API's description, and the pages, which
/// ask for a key.
fn is_open_path(path: &str) -> bool {
    let facts = matches!(
        path,
        "/version"
            | "/openapi.json"
            | "/ping"
            | "/health"
            | "/health/live"
            | "/health/ready"
            | "/health_generate"
    );
    facts || matches!(path, "/" | "/status") || path.starts_with(page::FOLDER)
}

fn presented_key(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| {
        let (scheme, key) = value.as_bytes().split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"Bearer ").then(|| key.trim_ascii())
    });
    bearer.or_else(|| headers.get("x-api-key").map(|value| value.as_bytes().trim_ascii()))
}

fn unauthorized(headers: &HeaderMap) -> ApiError {
    let message = match presented_key(headers) {
        Some(_) => "the API key is not valid",
        None => "an API key is needed: send `Authorization: Bearer <key>` or `x-api-key: <key>`",
    };
    // The body is not read before the key is known.
    ApiError::new(StatusCode::UNAUTHORIZED, message).with_code("invalid_api_key").closing()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name_of(keys: &Keys, presented: &str) -> Option<String> {
        keys.holder(Some(presented.as_bytes())).map(|account| account.name.clone())
    }

    #[test]
    fn accepts_each_key_and_nothing_else() {
        let named = ApiKey { name: Some("bob".into()), ..ApiKey::from("beta") };
        let keys = Keys::new(&["alpha".into(), named], Some("root"));
        assert_eq!(name_of(&keys, "alpha").as_deref(), Some("key-1"));
        assert_eq!(name_of(&keys, "beta").as_deref(), Some("bob"));
        assert!(keys.holder(Some(b"root")).unwrap().admin && !keys.holder(Some(b"beta")).unwrap().admin);
        for wrong in ["alph", "alphaa", "", "ALPHA", "alphabeta", "bob"] {
            assert_eq!(name_of(&keys, wrong), None);
        }
        assert!(keys.holder(None).is_none());
        let open = Keys::new(&[], Some("root"));
        assert_eq!(open.holder(None).unwrap().name, "anybody");
        assert_eq!(name_of(&open, "whatever").as_deref(), Some("anybody"));
        assert!(open.holder(Some(b"root")).unwrap().admin);
    }

    #[test]
    fn other_keys_take_over_and_what_was_used_stays_used() {
        let limits = RateLimits { requests_per_minute: Some(1), tokens_per_minute: None };
        let alice = |secret: &str| ApiKey { name: Some("alice".into()), limits, ..secret.into() };
        let keys = Keys::new(&[alice("old"), "gone".into()], None);
        keys.holder(Some(b"old")).unwrap().admit(1, Instant::now()).unwrap();
        keys.replace(&[alice("new")]);
        assert!(keys.holder(Some(b"old")).is_none() && keys.holder(Some(b"gone")).is_none());
        keys.holder(Some(b"new")).unwrap().admit(1, Instant::now()).unwrap_err();
    }

    #[test]
    fn reads_both_headers() {
        let mut headers = HeaderMap::new();
        assert_eq!(presented_key(&headers), None);
        headers.insert("x-api-key", "k1".parse().unwrap());
        assert_eq!(presented_key(&headers), Some(&b"k1"[..]));
        headers.insert(header::AUTHORIZATION, "bearer  k2 ".parse().unwrap());
        assert_eq!(presented_key(&headers), Some(&b"k2"[..]));
        headers.insert(header::AUTHORIZATION, "Basic abc".parse().unwrap());
        assert_eq!(presented_key(&headers), Some(&b"k1"[..]));
    }
}
