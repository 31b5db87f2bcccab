//! The same server through TLS.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use qwill_server::{ServerOptions, Tls};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio_rustls::TlsConnector;

use crate::client::{Bench, CHAT, plain_chat, with};
use crate::sockets::{connect, get, post};

/// Made for these tests and worth nothing: a certificate for `localhost` and 127.0.0.1, with its key.
const CERTIFICATE: &[u8] = include_bytes!("tls/localhost.crt");
const KEY: &[u8] = include_bytes!("tls/localhost.key");

fn connector() -> TlsConnector {
    let mut roots = RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(CERTIFICATE).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder =
        ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    TlsConnector::from(Arc::new(builder.with_root_certificates(roots).with_no_client_auth()))
}

async fn exchange(address: SocketAddr, request: String) -> std::io::Result<String> {
    let name = ServerName::try_from("localhost").unwrap();
    let mut stream = connector().connect(name, connect(address).await).await?;
    stream.write_all(request.as_bytes()).await?;
    let mut text = String::new();
    stream.read_to_string(&mut text).await?;
    Ok(text)
}

fn options() -> ServerOptions {
    ServerOptions { tls: Some(Tls::new(CERTIFICATE, KEY).unwrap()), ..Default::default() }
}

#[tokio::test]
async fn answers_and_streams_come_through_and_end_in_order() {
    let bench = Bench::saying("one two three");
    let listening = bench.listen(options()).await;
    let plain = exchange(listening.address, post(CHAT, &plain_chat().to_string())).await.unwrap();
    assert!(plain.starts_with("HTTP/1.1 200") && plain.contains("one two three"), "{plain}");
    let body = with(plain_chat(), json!({"stream": true})).to_string();
    // `read_to_string` fails where the end is not announced, as an attacker's cut would not be.
    let streamed = exchange(listening.address, post(CHAT, &body)).await.unwrap();
    assert!(streamed.contains("data: [DONE]"), "{streamed}");
    listening.stop.send(()).unwrap();
    tokio::time::timeout(Duration::from_secs(5), listening.task).await.unwrap().unwrap().unwrap();
}

#[tokio::test]
async fn whoever_speaks_no_tls_or_nothing_is_cut_off_and_holds_up_nobody() {
    let bench = Bench::saying("ok");
    let listening =
        bench.listen(ServerOptions { read_timeout: Duration::from_millis(300), ..options() }).await;
    let mut silent = connect(listening.address).await;
    let mut plain = connect(listening.address).await;
    plain.write_all(get("/health").as_bytes()).await.unwrap();
    let health = exchange(listening.address, get("/health")).await.unwrap();
    assert!(health.starts_with("HTTP/1.1 200"), "{health}");
    let start = Instant::now();
    let mut bytes = Vec::new();
    let _ = plain.read_to_end(&mut bytes).await;
    assert!(!bytes.starts_with(b"HTTP"), "no answer in the clear");
    let _ = silent.read_to_end(&mut bytes).await;
    assert!(start.elapsed() < Duration::from_secs(10));
    // Nor does it hold up the end.
    let held = connect(listening.address).await;
    listening.stop.send(()).unwrap();
    tokio::time::timeout(Duration::from_secs(5), listening.task).await.unwrap().unwrap().unwrap();
    drop(held);
}

#[test]
fn what_is_no_certificate_or_not_its_key_is_refused() {
    for (certificate, key, fragment) in [
        (&b""[..], KEY, "no certificate"),
        (KEY, KEY, "no certificate"),
        (CERTIFICATE, &b"nonsense"[..], "no private key"),
        (CERTIFICATE, CERTIFICATE, "no private key"),
    ] {
        let error = Tls::new(certificate, key).unwrap_err().to_string();
        assert!(error.contains(fragment), "{error}");
    }
    let tls = Tls::new(CERTIFICATE, KEY).unwrap();
    assert!(tls.replace(b"", KEY).is_err());
    tls.replace(CERTIFICATE, KEY).unwrap();
}
