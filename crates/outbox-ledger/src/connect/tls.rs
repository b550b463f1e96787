//! PEM files in the forms that the driver understands.
//!
//! The driver reads only the first certificate of a CA file, and private keys only as PKCS#8. A
//! bundle is therefore split and its members tried in turn, and a key is converted.

use std::path::{Path, PathBuf};

use openssl::pkey::PKey;
use openssl::x509::X509;
use sqlx::mysql::{MySqlConnectOptions, MySqlSslMode};

use crate::error::{DbError, DbResult};

/// `mysql.ssl_mode` with its files, all of them PEM.
#[derive(Clone, Debug, Default)]
pub struct Tls {
    /// How much is demanded.
    pub mode: SslMode,
    /// Certificates to trust; any number in one file.
    pub ca: Option<PathBuf>,
    /// Our certificate, with its chain.
    pub cert: Option<PathBuf>,
    /// Its key, in any PEM form, not encrypted.
    pub key: Option<PathBuf>,
}

/// The five values of `ssl_mode`, as MySQL's own clients know them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SslMode {
    /// In clear.
    Disabled,
    /// TLS where the server offers it.
    #[default]
    Preferred,
    /// TLS, whoever the server is.
    Required,
    /// TLS, the server's certificate signed by a trusted authority.
    VerifyCa,
    /// The same, and issued for this host.
    VerifyIdentity,
}

impl From<SslMode> for MySqlSslMode {
    fn from(mode: SslMode) -> Self {
        match mode {
            SslMode::Disabled => Self::Disabled,
            SslMode::Preferred => Self::Preferred,
            SslMode::Required => Self::Required,
            SslMode::VerifyCa => Self::VerifyCa,
            SslMode::VerifyIdentity => Self::VerifyIdentity,
        }
    }
}

/// The files' contents, converted.
#[derive(Clone, Debug, Default)]
pub(super) struct Material {
    /// One PEM for each trusted certificate.
    authorities: Vec<Vec<u8>>,
    identity: Option<(Vec<u8>, Vec<u8>)>,
}

impl Material {
    /// Reads and converts the files.
    pub(super) fn load(tls: &Tls) -> DbResult<Self> {
        let authorities = match &tls.ca {
            Some(path) => split(&read("ssl_ca", path)?).map_err(|e| unusable("ssl_ca", path, e))?,
            None => Vec::new(),
        };
        let identity = match (&tls.cert, &tls.key) {
            (Some(cert), Some(key)) => {
                let pkcs8 =
                    pkcs8(&read("ssl_key", key)?).map_err(|e| unusable("ssl_key", key, e))?;
                Some((read("ssl_cert", cert)?, pkcs8))
            }
            (None, None) => None,
            _ => {
                let text = "ssl_cert and ssl_key are needed together".to_owned();
                return Err(DbError::Config(text));
            }
        };
        Ok(Self {
            authorities,
            identity,
        })
    }

    /// How many variants [`Material::apply`] knows: one for each authority.
    pub(super) fn variants(&self) -> usize {
        self.authorities.len().max(1)
    }

    /// Options with the `variant`th authority.
    pub(super) fn apply(
        &self,
        mut options: MySqlConnectOptions,
        mode: SslMode,
        variant: usize,
    ) -> MySqlConnectOptions {
        options = options.ssl_mode(mode.into());
        if let Some(ca) = self.authorities.get(variant % self.variants()) {
            options = options.ssl_ca_from_pem(ca.clone());
        }
        if let Some((cert, key)) = &self.identity {
            options = options
                .ssl_client_cert_from_pem(cert)
                .ssl_client_key_from_pem(key);
        }
        options
    }
}

fn read(name: &str, path: &Path) -> DbResult<Vec<u8>> {
    std::fs::read(path).map_err(|e| unusable(name, path, e))
}

fn unusable(name: &str, path: &Path, error: impl std::fmt::Display) -> DbError {
    DbError::Config(format!("{name} {}: {error}", path.display()))
}

fn split(bundle: &[u8]) -> Result<Vec<Vec<u8>>, openssl::error::ErrorStack> {
    X509::stack_from_pem(bundle)?
        .iter()
        .map(|c| c.to_pem())
        .collect()
}

fn pkcs8(key: &[u8]) -> Result<Vec<u8>, openssl::error::ErrorStack> {
    // The callback answers an encrypted key with an empty pass phrase, instead of a prompt.
    PKey::private_key_from_pem_callback(key, |_| Ok(0))?.private_key_to_pem_pkcs8()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use openssl::asn1::Asn1Time;
    use openssl::hash::MessageDigest;
    use openssl::rsa::Rsa;
    use openssl::x509::X509Builder;

    use super::*;

    fn certificate() -> Vec<u8> {
        let key = PKey::from_rsa(Rsa::generate(2048).unwrap()).unwrap();
        let mut builder = X509Builder::new().unwrap();
        builder.set_pubkey(&key).unwrap();
        builder
            .set_not_before(&Asn1Time::days_from_now(0).unwrap())
            .unwrap();
        builder
            .set_not_after(&Asn1Time::days_from_now(1).unwrap())
            .unwrap();
        builder.sign(&key, MessageDigest::sha256()).unwrap();
        builder.build().to_pem().unwrap()
    }

    #[test]
    fn a_bundle_is_split_into_its_certificates() {
        let (a, b) = (certificate(), certificate());
        assert_eq!(split(&[a.clone(), b.clone()].concat()).unwrap(), [a, b]);
    }

    #[test]
    fn a_traditional_rsa_key_becomes_pkcs8() {
        let key = Rsa::generate(2048).unwrap().private_key_to_pem().unwrap();
        assert!(key.starts_with(b"-----BEGIN RSA PRIVATE KEY-----"));
        let converted = pkcs8(&key).unwrap();
        assert!(converted.starts_with(b"-----BEGIN PRIVATE KEY-----"));
        assert_eq!(pkcs8(&converted).unwrap(), converted);
    }
}
