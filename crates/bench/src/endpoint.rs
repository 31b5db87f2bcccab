//! Where the server is.

use hyper::Uri;

use crate::BenchError;

/// The parts of an API's address, such as `http://127.0.0.1:8000/v1`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Endpoint {
    /// Without brackets for IPv6.
    pub(crate) host: String,
    pub(crate) port: u16,
    /// What the `Host` header says.
    pub(crate) authority: String,
    /// What comes before `/v1`: empty or `/some/path`.
    root: String,
}

impl Endpoint {
    /// Reads an address with or without the `/v1` and a last slash.
    pub(crate) fn parse(url: &str) -> Result<Self, BenchError> {
        const EXAMPLE: &str = "write the API's address, such as http://127.0.0.1:8000/v1";
        let wrong = |reason, hint| BenchError::Url { url: url.to_owned(), reason, hint };
        let uri: Uri = url.trim().parse().map_err(|_| wrong("it is no URL", EXAMPLE))?;
        match uri.scheme_str() {
            Some("http") => {}
            Some("https") => {
                let hint = "measure without TLS, on the server itself or through a local proxy: encryption \
                            would be part of every figure";
                return Err(wrong("https is not spoken here", hint));
            }
            _ => return Err(wrong("it does not begin with http://", EXAMPLE)),
        }
        if uri.query().is_some() {
            return Err(wrong("it has a query", EXAMPLE));
        }
        let authority = uri.authority().ok_or_else(|| wrong("it names no host", EXAMPLE))?;
        if authority.as_str().contains('@') {
            return Err(wrong("it holds a user name", "give a key with --api-key-env"));
        }
        let host = authority.host().trim_start_matches('[').trim_end_matches(']');
        if host.is_empty() {
            return Err(wrong("it names no host", EXAMPLE));
        }
        let path = uri.path().trim_end_matches('/');
        Ok(Self {
            host: host.to_owned(),
            port: authority.port_u16().unwrap_or(80),
            authority: authority.as_str().to_owned(),
            root: path.strip_suffix("/v1").unwrap_or(path).to_owned(),
        })
    }

    /// A path of the server, `/v1/models` or `/tokenize`, as it is asked for.
    pub(crate) fn path(&self, path: &str) -> String {
        format!("{}{path}", self.root)
    }

    /// The API's address in its usual form.
    pub(crate) fn url(&self) -> String {
        format!("http://{}{}/v1", self.authority, self.root)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_taken_in_every_usual_form() {
        for (url, host, port, path) in [
            ("http://127.0.0.1:8000/v1", "127.0.0.1", 8000, "/v1/models"),
            ("http://127.0.0.1:8000/v1/", "127.0.0.1", 8000, "/v1/models"),
            ("http://127.0.0.1:8000", "127.0.0.1", 8000, "/v1/models"),
            (" http://gpu ", "gpu", 80, "/v1/models"),
            ("http://[::1]:18020/v1", "::1", 18020, "/v1/models"),
            ("http://proxy/a/b/v1", "proxy", 80, "/a/b/v1/models"),
        ] {
            let endpoint = Endpoint::parse(url).unwrap();
            assert_eq!((endpoint.host.as_str(), endpoint.port), (host, port), "{url}");
            assert_eq!(endpoint.path("/v1/models"), path, "{url}");
        }
        assert_eq!(Endpoint::parse("http://h:1/x/").unwrap().url(), "http://h:1/x/v1");
    }

    #[test]
    fn other_addresses_are_refused_with_the_reason() {
        for (url, reason) in [
            ("https://example.org/v1", "https is not spoken here"),
            ("127.0.0.1:8000/v1", "no URL"),
            ("localhost", "does not begin with http://"),
            ("ftp://h/v1", "does not begin with http://"),
            ("http://", "no URL"),
            ("", "no URL"),
            ("http://h/v1?x=1", "a query"),
            ("http://me:secret@h/v1", "a user name"),
            ("http://a b/v1", "no URL"),
        ] {
            let error = Endpoint::parse(url).unwrap_err();
            assert!(error.to_string().contains(reason), "{url}: {error}");
            assert!(error.hint().is_some());
        }
    }
}
