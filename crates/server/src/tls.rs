//! TLS: a certificate and its key, which may be exchanged while the server runs.

use std::fmt;
use std::sync::{Arc, PoisonError, RwLock};

use rustls::ServerConfig;
use rustls::crypto::ring;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;

use crate::ServerError;

/// What a server shows to prove who it is. Clones share it.
#[derive(Clone)]
pub struct Tls(Arc<RwLock<Arc<ServerConfig>>>);

impl Tls {
    /// Takes a chain of certificates, the server's own first, and the private key of the first one, both as PEM.
    ///
    /// # Errors
    /// [`ServerError::Tls`] when one of them cannot be read, or they do not belong together.
    pub fn new(certificates: &[u8], key: &[u8]) -> Result<Self, ServerError> {
        Ok(Self(Arc::new(RwLock::new(config(certificates, key)?))))
    }

    /// Shows others from now on; connections that are open stay as they are.
    ///
    /// # Errors
    /// As [`Tls::new`]; the old ones stay then.
    pub fn replace(&self, certificates: &[u8], key: &[u8]) -> Result<(), ServerError> {
        let config = config(certificates, key)?;
        *self.0.write().unwrap_or_else(PoisonError::into_inner) = config;
        Ok(())
    }

    pub(crate) fn acceptor(&self) -> TlsAcceptor {
        TlsAcceptor::from(Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner)))
    }
}

impl fmt::Debug for Tls {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str("Tls")
    }
}

fn config(certificates: &[u8], key: &[u8]) -> Result<Arc<ServerConfig>, ServerError> {
    let fail = |problem: String| ServerError::Tls { problem };
    let chain: Vec<CertificateDer<'static>> = CertificateDer::pem_slice_iter(certificates)
        .collect::<Result<_, _>>()
        .map_err(|error| fail(format!("the certificate is not PEM: {error}")))?;
    if chain.is_empty() {
        return Err(fail("there is no certificate in the file, which must be PEM".into()));
    }
    let key = PrivateKeyDer::from_pem_slice(key)
        .map_err(|error| fail(format!("there is no private key in the file, which must be PEM: {error}")))?;
    let mut config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, key))
        .map_err(|error| fail(format!("certificate and key cannot be used: {error}")))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}
