//! PEM files to what native-tls takes.

use std::path::{Path, PathBuf};

use lapin::tcp::{OwnedIdentity, OwnedTLSConfig};
use openssl::pkcs12::Pkcs12;
use openssl::pkey::PKey;
use openssl::stack::Stack;
use openssl::x509::X509;

use super::TlsFiles;

/// TLS files that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    /// A file cannot be read.
    #[error("cannot read {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file does not hold what it should.
    #[error("{} is not a {what} in PEM", path.display())]
    Pem {
        /// The file.
        path: PathBuf,
        /// What was expected.
        what: &'static str,
        /// Why.
        source: openssl::error::ErrorStack,
    },
    /// Certificate without key, or the other way round.
    #[error("a client certificate needs both ssl_cert and ssl_key")]
    Half,
}

fn read(path: &Path) -> Result<Vec<u8>, TlsError> {
    std::fs::read(path).map_err(|source| TlsError::Read {
        path: path.to_owned(),
        source,
    })
}

/// Reads the files. lapin's PKCS#8 takes neither an EC nor a traditional RSA key, so the identity
/// goes through PKCS#12 whatever its form.
pub(super) fn config(files: &TlsFiles) -> Result<OwnedTLSConfig, TlsError> {
    let cert_chain = match &files.ca {
        None => None,
        Some(path) => {
            let pem = read(path)?;
            let bad = |source| TlsError::Pem {
                path: path.clone(),
                what: "certificate bundle",
                source,
            };
            let mut bundle = String::new();
            for cert in X509::stack_from_pem(&pem).map_err(bad)? {
                let pem = cert.to_pem().map_err(bad)?;
                bundle.push_str(&String::from_utf8_lossy(&pem));
            }
            Some(bundle)
        }
    };
    let identity = match (&files.cert, &files.key) {
        (None, None) => None,
        (Some(cert), Some(key)) => Some(identity(cert, key)?),
        _ => return Err(TlsError::Half),
    };
    Ok(OwnedTLSConfig {
        identity,
        cert_chain,
    })
}

fn identity(cert: &Path, key: &Path) -> Result<OwnedIdentity, TlsError> {
    let pem = |path: &Path, what| {
        let path = path.to_owned();
        move |source| TlsError::Pem { path, what, source }
    };
    let mut chain = X509::stack_from_pem(&read(cert)?)
        .map_err(pem(cert, "certificate"))?
        .into_iter();
    let Some(leaf) = chain.next() else {
        return Err(pem(cert, "certificate")(openssl::error::ErrorStack::get()));
    };
    let private = PKey::private_key_from_pem(&read(key)?).map_err(pem(key, "private key"))?;
    let build = || {
        let mut rest = Stack::new()?;
        for issuer in chain {
            rest.push(issuer)?;
        }
        let mut builder = Pkcs12::builder();
        builder.cert(&leaf).pkey(&private).ca(rest);
        builder.build2("")?.to_der()
    };
    Ok(OwnedIdentity::PKCS12 {
        der: build().map_err(pem(cert, "certificate that belongs to ssl_key"))?,
        password: String::new(),
    })
}
