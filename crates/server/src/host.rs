//! Which names the server answers to, against web pages that point their own name at this machine (DNS rebinding).

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::app::App;
use crate::error::ApiError;
use crate::options::ServerOptions;

/// Names in `Host` that are answered.
pub(crate) enum Names {
    /// Any: there is a key, or the server is meant for others.
    All,
    /// Those of this machine, and these.
    Loopback(Vec<String>),
}

impl Names {
    /// A server without keys that listens on this machine only trusts whoever reaches it. A web page that has its
    /// own name resolve to 127.0.0.1 reaches it too, with the rights of its own origin; its name gives it away.
    pub(crate) fn of(options: &ServerOptions, address: IpAddr) -> Self {
        if options.api_keys.is_empty() && address.to_canonical().is_loopback() {
            Self::Loopback(options.allowed_hosts.iter().map(|name| name.to_ascii_lowercase()).collect())
        } else {
            Self::All
        }
    }

    /// Whether a `Host`, with or without a port, is answered.
    fn accept(&self, authority: &str) -> bool {
        let Self::Loopback(others) = self else { return true };
        let host = host_of(authority).to_ascii_lowercase();
        let is_loopback = |address: IpAddr| address.to_canonical().is_loopback();
        host == "localhost" || host.parse().is_ok_and(is_loopback) || others.contains(&host)
    }
}

/// The host of `host`, `host:port` or `[address]:port`, without the dot of a full name.
fn host_of(authority: &str) -> &str {
    match authority.strip_prefix('[').and_then(|rest| rest.split_once(']')) {
        Some((address, _)) => address,
        None => authority.split(':').next().unwrap_or_default().trim_end_matches('.'),
    }
}

/// Answers 403 to requests for another host. One without any host comes from no browser.
pub(crate) async fn require_known(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let of_uri = request.uri().authority().map(|authority| authority.as_str().to_owned());
    // Bytes that are no text are no name.
    let of_headers =
        request.headers().get_all(header::HOST).iter().map(|value| value.to_str().unwrap_or("?").to_owned());
    let refused = of_headers.chain(of_uri).find(|host| !app.host_names.accept(host));
    match refused {
        None => next.run(request).await,
        Some(host) => not_allowed(&host, request.uri()).into_response(),
    }
}

fn not_allowed(host: &str, uri: &Uri) -> ApiError {
    let shown: String = host.chars().take(80).collect();
    let path: String = uri.path().chars().take(80).collect();
    let message = format!(
        "{path}: this server has no key and answers to localhost and loopback addresses only, not to the host \
         {shown:?}: allow the name with --allowed-host, or set a key with --api-key"
    );
    ApiError::new(StatusCode::FORBIDDEN, message).with_code("host_not_allowed").closing()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn loopback_names_and_allowed_ones() {
        let options = ServerOptions { allowed_hosts: vec!["Box.lan".into()], ..Default::default() };
        let names = Names::of(&options, options.bind.ip());
        let good = [
            "localhost",
            "LOCALHOST:1",
            "localhost.:80",
            "127.0.0.1",
            "127.9.9.9:18020",
            "[::1]:5",
            "box.LAN:9",
        ];
        for host in good.into_iter().chain(["[::ffff:127.0.0.1]"]) {
            assert!(names.accept(host), "{host}");
        }
        for host in [
            "",
            "evil.example",
            "localhost.evil.example",
            "127.0.0.1.evil.example:80",
            "10.0.0.1",
            "[::2]",
            "[::1",
            "box.lan.evil.example",
            "evil.example@localhost",
            "0.0.0.0",
            "?",
        ] {
            assert!(!names.accept(host), "{host}");
        }
    }

    #[test]
    fn only_open_servers_of_this_machine_look_at_names() {
        let open = ServerOptions::default();
        let keyed = ServerOptions { api_keys: vec!["k".into()], ..Default::default() };
        let accepts = |options: &ServerOptions, address: &str| {
            Names::of(options, address.parse().unwrap()).accept("evil.example")
        };
        assert!(!accepts(&open, "127.0.0.1") && !accepts(&open, "::1") && !accepts(&open, "127.0.0.5"));
        assert!(accepts(&keyed, "127.0.0.1") && accepts(&open, "0.0.0.0") && accepts(&open, "192.168.1.2"));
    }
}
