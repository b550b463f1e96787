//! AMQP over TLS, with a client certificate.

#![allow(clippy::unwrap_used, clippy::panic)]

mod rabbit_support;

use std::path::Path;
use std::time::Duration;

use openssl::asn1::Asn1Time;
use openssl::bn::BigNum;
use openssl::ec::{EcGroup, EcKey};
use openssl::hash::MessageDigest;
use openssl::nid::Nid;
use openssl::pkey::{PKey, Private};
use openssl::x509::extension::{BasicConstraints, SubjectAlternativeName};
use openssl::x509::{X509, X509Name};
use outbox_core::ports::{BrokerState, Publisher};
use outbox_tail::rabbit::TlsFiles;
use outbox_testkit::Rabbit;
use outbox_testkit::root::{free_port, servers};
use rabbit_support::{config, deliver, message, run, within};

struct Signed {
    cert: X509,
    key: PKey<Private>,
}

fn sign(name: &str, issuer: Option<&Signed>) -> Signed {
    let group = EcGroup::from_curve_name(Nid::X9_62_PRIME256V1).unwrap();
    let key = PKey::from_ec_key(EcKey::generate(&group).unwrap()).unwrap();
    let mut subject = X509Name::builder().unwrap();
    subject.append_entry_by_text("CN", name).unwrap();
    let subject = subject.build();
    let mut cert = X509::builder().unwrap();
    cert.set_version(2).unwrap();
    let serial = BigNum::from_u32(u32::try_from(name.len()).unwrap()).unwrap();
    cert.set_serial_number(&serial.to_asn1_integer().unwrap())
        .unwrap();
    cert.set_subject_name(&subject).unwrap();
    cert.set_issuer_name(issuer.map_or(&subject, |i| i.cert.subject_name()))
        .unwrap();
    cert.set_pubkey(&key).unwrap();
    cert.set_not_before(&Asn1Time::days_from_now(0).unwrap())
        .unwrap();
    cert.set_not_after(&Asn1Time::days_from_now(2).unwrap())
        .unwrap();
    if issuer.is_none() {
        cert.append_extension(BasicConstraints::new().critical().ca().build().unwrap())
            .unwrap();
    } else {
        let context = cert.x509v3_context(None, None);
        let san = SubjectAlternativeName::new()
            .dns("localhost")
            .build(&context)
            .unwrap();
        cert.append_extension(san).unwrap();
    }
    cert.sign(issuer.map_or(&key, |i| &i.key), MessageDigest::sha256())
        .unwrap();
    Signed {
        cert: cert.build(),
        key,
    }
}

fn write(folder: &Path, name: &str, signed: &Signed) {
    std::fs::write(
        folder.join(format!("{name}.pem")),
        signed.cert.to_pem().unwrap(),
    )
    .unwrap();
    // The traditional form, which is not PKCS#8.
    let key = signed.key.ec_key().unwrap().private_key_to_pem().unwrap();
    std::fs::write(folder.join(format!("{name}.key")), key).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn amqps_takes_pem_files_of_any_form_and_says_what_is_wrong_without_them() {
    let root = servers().await.unwrap();
    let folder = tempfile::tempdir_in(root.join("tmp")).unwrap();
    let (other, ca) = (sign("another authority", None), sign("authority", None));
    write(folder.path(), "server", &sign("broker", Some(&ca)));
    write(folder.path(), "client", &sign("relay", Some(&ca)));
    write(folder.path(), "ca", &ca);
    // A bundle of which the second is the right one.
    let mut bundle = other.cert.to_pem().unwrap();
    bundle.extend(ca.cert.to_pem().unwrap());
    std::fs::write(folder.path().join("bundle.pem"), bundle).unwrap();
    // The broker runs as a user of its own.
    let all = <std::fs::Permissions as std::os::unix::fs::PermissionsExt>::from_mode(0o755);
    std::fs::set_permissions(folder.path(), all).unwrap();

    let inside = Path::new("/tmp").join(folder.path().file_name().unwrap());
    let (port, inside) = (free_port().unwrap(), inside.display());
    let rabbit = Rabbit::start_with(&format!(
        "listeners.ssl.default = 127.0.0.1:{port}\n\
         ssl_options.cacertfile = {inside}/ca.pem\n\
         ssl_options.certfile = {inside}/server.pem\n\
         ssl_options.keyfile = {inside}/server.key\n\
         ssl_options.verify = verify_peer\n\
         ssl_options.fail_if_no_peer_cert = true\n"
    ))
    .await
    .unwrap();
    rabbit.topology("x", "q", "#").await.unwrap();

    let mut asked = config(&format!("amqps://guest:guest@localhost:{port}/%2f"));
    let untrusting = run(asked.clone());
    within(
        Duration::from_secs(10),
        "an untrusted certificate is told",
        async {
            loop {
                if let BrokerState::Down(why) = untrusting.publisher.state()
                    && why.contains("certificate verify failed")
                {
                    assert!(why.contains(&format!("localhost:{port}")), "{why}");
                    return;
                }
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        },
    )
    .await;
    untrusting.stop().await;

    asked.tls = TlsFiles {
        ca: Some(folder.path().join("bundle.pem")),
        cert: Some(folder.path().join("client.pem")),
        key: Some(folder.path().join("client.key")),
    };
    let running = run(asked.clone());
    let report = within(
        Duration::from_secs(20),
        "delivery",
        deliver(&running.publisher, 200, 50, |i| message("x", "k", i, 1000)),
    )
    .await;
    assert_eq!(report.confirmed(), 200);
    running.stop().await;

    asked.tls.key = None;
    let half = run(asked);
    within(Duration::from_secs(10), "the missing half is told", async {
        while !matches!(half.publisher.state(), BrokerState::Down(why) if why.contains("both ssl_cert and ssl_key"))
        {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    })
    .await;
    half.stop().await;
}
