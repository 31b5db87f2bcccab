//! The chat page and the status page: files inside the binary, which need nothing from anywhere else.

use axum::extract::Path;
use axum::extract::rejection::PathRejection;
use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{Html, IntoResponse};

use crate::error::ApiError;

/// Scripts and styles are files of this server, never text within a page; no string becomes markup; the pages talk to
/// this server alone and stand in no other page's frame.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; \
                      connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
                      require-trusted-types-for 'script'; trusted-types 'none'";

const SCRIPT: &str = "text/javascript; charset=utf-8";

/// What the pages are made of: name, type, text.
const FILES: &[(&str, &str, &str)] = &[
    ("style.css", "text/css; charset=utf-8", include_str!("page/style.css")),
    ("status.css", "text/css; charset=utf-8", include_str!("page/status.css")),
    ("icon.svg", "image/svg+xml", include_str!("page/icon.svg")),
    ("theme.js", SCRIPT, include_str!("page/theme.js")),
    ("common.js", SCRIPT, include_str!("page/common.js")),
    ("chat.js", SCRIPT, include_str!("page/chat.js")),
    ("sidebar.js", SCRIPT, include_str!("page/sidebar.js")),
    ("settings.js", SCRIPT, include_str!("page/settings.js")),
    ("store.js", SCRIPT, include_str!("page/store.js")),
    ("run.js", SCRIPT, include_str!("page/run.js")),
    ("turns.js", SCRIPT, include_str!("page/turns.js")),
    ("markdown.js", SCRIPT, include_str!("page/markdown.js")),
    ("highlight.js", SCRIPT, include_str!("page/highlight.js")),
    ("status.js", SCRIPT, include_str!("page/status.js")),
    ("chart.js", SCRIPT, include_str!("page/chart.js")),
];

/// Where the files are; like the pages themselves they are open, because a page has to be there to ask for a key.
pub(crate) const FOLDER: &str = "/page/";

/// `GET /`.
pub(crate) async fn chat() -> impl IntoResponse {
    (guard(), Html(include_str!("page/chat.html")))
}

/// `GET /status`.
pub(crate) async fn status() -> impl IntoResponse {
    (guard(), Html(include_str!("page/status.html")))
}

/// `GET /page/{name}`.
pub(crate) async fn file(name: Result<Path<String>, PathRejection>) -> Result<impl IntoResponse, ApiError> {
    let name = name.map(|Path(name)| name).unwrap_or_default();
    let Some((_, kind, text)) = FILES.iter().find(|(known, ..)| *known == name) else {
        let name: String = name.chars().take(80).collect();
        let message = format!("the pages have no file {name:?}");
        return Err(ApiError::new(StatusCode::NOT_FOUND, message).with_code("not_found"));
    };
    Ok((guard(), [(header::CONTENT_TYPE, HeaderValue::from_static(kind))], *text))
}

/// Headers of everything here. Nothing is kept by browsers: the files of two versions do not mix.
fn guard() -> [(header::HeaderName, HeaderValue); 4] {
    [
        (header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY)),
        (header::CACHE_CONTROL, HeaderValue::from_static("no-cache")),
        (header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff")),
        (header::REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Most bytes that a browser loads for the chat page, and for both.
    const MOST_BYTES: (usize, usize) = (84 << 10, 100 << 10);

    #[test]
    fn the_pages_are_small_and_name_nothing_elsewhere() {
        let files = || FILES.iter().map(|(name, _, text)| (*name, *text));
        let pages = [
            ("chat.html", include_str!("page/chat.html")),
            ("status.html", include_str!("page/status.html")),
        ];
        let texts = || pages.into_iter().chain(files());
        let of_chat = |name: &str| !name.starts_with("status") && name != "chart.js";
        let chat_bytes: usize = texts().filter(|(name, _)| of_chat(name)).map(|(_, text)| text.len()).sum();
        let all_bytes: usize = texts().map(|(_, text)| text.len()).sum();
        assert!(chat_bytes <= MOST_BYTES.0, "{chat_bytes} bytes");
        assert!(all_bytes <= MOST_BYTES.1, "{all_bytes} bytes");
        for (_, text) in texts() {
            let elsewhere = text.replace("http://www.w3.org/2000/svg", "");
            assert!(!elsewhere.contains("://"), "{:?}", elsewhere.split_once("://"));
            assert!(!text.contains("innerHTML") && !text.contains("eval("));
        }
    }

    #[test]
    fn every_file_that_a_page_names_is_there_and_none_is_left_over() {
        let pages = [include_str!("page/chat.html"), include_str!("page/status.html")];
        let texts: Vec<&str> = pages.into_iter().chain(FILES.iter().map(|(.., text)| *text)).collect();
        for (name, ..) in FILES {
            let named = texts.iter().any(|text| {
                text.contains(&format!("\"page/{name}\"")) || text.contains(&format!("\"./{name}\""))
            });
            assert!(named, "{name} is not used");
        }
        let imports = texts.iter().flat_map(|text| text.split("from \"./").skip(1));
        for name in imports.filter_map(|rest| rest.split('"').next()) {
            assert!(FILES.iter().any(|(known, ..)| *known == name), "{name} is missing");
        }
    }
}
