//! Column types, each with a generator of random values as SQL.

use outbox_tail::decode::Flavour;
use rand::prelude::*;

pub(crate) type Generate = fn(&mut StdRng) -> String;

pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

pub(crate) fn binary(rng: &mut StdRng, max: usize) -> String {
    let len = rng.random_range(0..=max);
    // Many zeros: trailing ones are what gets lost.
    let bytes: Vec<u8> = (0..len)
        .map(|_| {
            if rng.random_bool(0.4) {
                0
            } else {
                rng.random()
            }
        })
        .collect();
    format!("x'{}'", hex(&bytes))
}

pub(crate) fn text(rng: &mut StdRng, alphabet: &str, max: usize) -> String {
    let chars: Vec<char> = alphabet.chars().collect();
    let text: String = (0..rng.random_range(0..=max))
        .map(|_| *chars.choose(rng).unwrap())
        .collect();
    format!("_utf8mb4 x'{}'", hex(text.as_bytes()))
}

pub(crate) fn time(rng: &mut StdRng) -> String {
    let sign = if rng.random() { "-" } else { "" };
    let (h, m, s) = (
        rng.random_range(0..838),
        rng.random_range(0..60),
        rng.random_range(0..60),
    );
    format!("'{sign}{h}:{m}:{s}.{:06}'", rng.random_range(0..1_000_000))
}

pub(crate) fn datetime(rng: &mut StdRng) -> String {
    if rng.random_bool(0.1) {
        return "'0000-00-00 00:00:00'".to_owned();
    }
    let (y, mo, d) = (
        rng.random_range(1..9999),
        rng.random_range(1..13),
        rng.random_range(1..29),
    );
    let (h, m, s) = (
        rng.random_range(0..24),
        rng.random_range(0..60),
        rng.random_range(0..60),
    );
    format!(
        "'{y:04}-{mo}-{d} {h}:{m}:{s}.{:06}'",
        rng.random_range(0..1_000_000)
    )
}

pub(crate) fn timestamp(rng: &mut StdRng) -> String {
    if rng.random_bool(0.1) {
        return "'0000-00-00 00:00:00'".to_owned();
    }
    let (y, mo, d) = (
        rng.random_range(1971..2037),
        rng.random_range(1..13),
        rng.random_range(1..29),
    );
    format!(
        "'{y}-{mo}-{d} {}:1:2.{:06}'",
        rng.random_range(0..24),
        rng.random_range(0..1_000_000)
    )
}

pub(crate) fn double(rng: &mut StdRng) -> String {
    let value: f64 = match rng.random_range(0..5) {
        0 => f64::from_bits(rng.random()),
        1 => rng.random_range(-1e3..1e3),
        2 => rng.random_range(-1000_i32..1000).into(),
        3 => 10_f64.powi(rng.random_range(-20..25)) * f64::from(rng.random_range(1..2000)),
        _ => *[0.0, -0.0, 0.1, 1e15, 1e14, 123_456_789_012_345_680.0]
            .choose(rng)
            .unwrap(),
    };
    if value.is_finite() {
        format!("{value:e}")
    } else {
        "1e0".to_owned()
    }
}

pub(crate) fn float(rng: &mut StdRng) -> String {
    let value: f32 = match rng.random_range(0..3) {
        0 => f32::from_bits(rng.random()),
        1 => rng.random_range(-1e3..1e3),
        _ => 10_f32.powi(rng.random_range(-20..25)) * f32::from(rng.random_range(1_i16..2000)),
    };
    if value.is_finite() {
        format!("{value:e}")
    } else {
        "-0e0".to_owned()
    }
}

pub(crate) fn decimal(rng: &mut StdRng, whole: usize, fraction: usize) -> String {
    let mut digits = |n: usize| -> String {
        (0..rng.random_range(0..=n))
            .map(|_| char::from(b'0' + rng.random_range(0..10)))
            .collect()
    };
    format!("'-0{}.{}0'", digits(whole), digits(fraction))
        .replace("'-", if rng.random() { "'" } else { "'-" })
}

/// Types that both servers have.
pub(crate) const TYPES: &[(&str, Generate)] = &[
    ("TINYINT", |r| r.random::<i8>().to_string()),
    ("TINYINT UNSIGNED", |r| r.random::<u8>().to_string()),
    ("SMALLINT", |r| r.random::<i16>().to_string()),
    ("SMALLINT UNSIGNED", |r| r.random::<u16>().to_string()),
    ("MEDIUMINT", |r| {
        r.random_range(-8_388_608..8_388_608).to_string()
    }),
    ("MEDIUMINT UNSIGNED", |r| {
        r.random_range(0..16_777_216).to_string()
    }),
    ("INT", |r| r.random::<i32>().to_string()),
    ("INT UNSIGNED ZEROFILL", |r| r.random::<u32>().to_string()),
    ("BIGINT", |r| r.random::<i64>().to_string()),
    ("BIGINT UNSIGNED", |r| r.random::<u64>().to_string()),
    ("BOOLEAN", |r| r.random_range(0..2).to_string()),
    ("YEAR", |r| {
        [0, 1901, 2155, 2024].choose(r).unwrap().to_string()
    }),
    ("BIT(1)", |r| r.random_range(0..2).to_string()),
    ("BIT(13)", |r| r.random_range(0..8192).to_string()),
    ("BIT(64)", |r| r.random::<u64>().to_string()),
    ("DECIMAL(10,2)", |r| decimal(r, 8, 2)),
    ("DECIMAL(65,30)", |r| decimal(r, 35, 30)),
    ("DECIMAL(5,5)", |r| decimal(r, 0, 5)),
    ("DECIMAL(18,0)", |r| decimal(r, 18, 0)),
    ("DECIMAL(12,3) UNSIGNED ZEROFILL", |r| decimal(r, 9, 3)),
    ("FLOAT", float),
    ("FLOAT UNSIGNED", |r| r.random_range(0..9999).to_string()),
    ("FLOAT(10,3)", float),
    ("FLOAT ZEROFILL", |r| {
        format!("{:e}", r.random_range(0.0..1e10_f32))
    }),
    ("DOUBLE", double),
    ("DOUBLE(20,4)", double),
    ("DOUBLE(12,2) ZEROFILL", double),
    ("DATE", datetime),
    ("TIME", time),
    ("TIME(1)", time),
    ("TIME(3)", time),
    ("TIME(6)", time),
    ("DATETIME", datetime),
    ("DATETIME(2)", datetime),
    ("DATETIME(5)", datetime),
    ("DATETIME(6)", datetime),
    ("TIMESTAMP NULL", timestamp),
    ("TIMESTAMP(3) NULL", timestamp),
    ("TIMESTAMP(6) NULL", timestamp),
    ("CHAR(5)", |r| text(r, "aé 😀 ", 5)),
    ("CHAR(100)", |r| text(r, "aé 😀 ", 100)),
    ("CHAR(7) CHARACTER SET latin1", |r| text(r, "aé €", 7)),
    ("CHAR(7) CHARACTER SET ucs2", |r| text(r, "aé中 ", 7)),
    ("VARCHAR(10)", |r| text(r, "aé 😀", 10)),
    ("VARCHAR(300) CHARACTER SET utf8mb3", |r| {
        text(r, "aé中", 300)
    }),
    ("VARCHAR(50) CHARACTER SET latin1", |r| text(r, "aéÿ€", 50)),
    ("VARCHAR(50) CHARACTER SET gbk", |r| text(r, "a中文", 50)),
    ("VARCHAR(50) CHARACTER SET utf16", |r| text(r, "a中😀", 50)),
    ("VARCHAR(50) CHARACTER SET utf32", |r| text(r, "a中😀", 50)),
    ("VARCHAR(50) CHARACTER SET sjis", |r| {
        text(r, "aｱ〜\\中", 50)
    }),
    ("VARCHAR(20) CHARACTER SET ascii", |r| text(r, "ab~", 20)),
    ("TINYTEXT", |r| text(r, "a\u{0}é", 50)),
    ("TEXT", |r| text(r, "a\n中", 500)),
    ("MEDIUMTEXT CHARACTER SET cp1251", |r| text(r, "aПр", 500)),
    ("LONGTEXT", |r| text(r, "a😀", 500)),
    ("BINARY(16)", |r| binary(r, 16)),
    ("BINARY(1)", |r| binary(r, 1)),
    ("BINARY(255)", |r| binary(r, 255)),
    ("VARBINARY(300)", |r| binary(r, 300)),
    ("TINYBLOB", |r| binary(r, 200)),
    ("BLOB", |r| binary(r, 500)),
    ("MEDIUMBLOB", |r| binary(r, 500)),
    ("LONGBLOB", |r| binary(r, 500)),
    ("ENUM('a','b b','é','')", |r| {
        r.random_range(0..5).to_string()
    }),
    ("ENUM('a','é') CHARACTER SET latin1", |r| {
        r.random_range(0..3).to_string()
    }),
    ("SET('x','y','é')", |r| r.random_range(0..8).to_string()),
    ("POINT", |r| {
        format!("ST_GeomFromText('POINT({} 2.5)')", r.random_range(0..99))
    }),
];

pub(crate) const MYSQL_TYPES: &[(&str, Generate)] = &[
    ("JSON", |r| {
        format!("JSON_OBJECT('k', {}, 'é', _utf8mb4'中')", double(r))
    }),
    ("VECTOR(3)", |r| {
        format!("TO_VECTOR('[1,{},-2.5]')", r.random_range(0..9))
    }),
    ("VARCHAR(50) CHARACTER SET gb18030", |r| {
        text(r, "a中😀", 50)
    }),
];

pub(crate) const MARIADB_TYPES: &[(&str, Generate)] = &[
    ("JSON", |r| {
        format!("JSON_OBJECT('k', {}, 'é', '中')", double(r))
    }),
    ("UUID", |r| format!("'{}'", uuid(r))),
    ("INET4", |r| {
        format!(
            "'{}.0.{}.{}'",
            r.random::<u8>(),
            r.random::<u8>(),
            r.random_range(0..2)
        )
    }),
    ("INET6", |r| format!("'{}'", inet6(r))),
];

pub(crate) fn uuid(rng: &mut StdRng) -> String {
    let mut b: [u8; 16] = rng.random();
    if rng.random() {
        b[6] = rng.random_range(0..9) << 4;
        b[8] = *[0x80, 0x81, 0xbf, 0x00, 0xff].choose(rng).unwrap();
    }
    if rng.random() {
        b[15] = 0;
    }
    let h = hex(&b);
    format!(
        "{}-{}-{}-{}-{}",
        &h[..8],
        &h[8..12],
        &h[12..16],
        &h[16..20],
        &h[20..]
    )
}

pub(crate) fn inet6(rng: &mut StdRng) -> String {
    let mut groups: [u16; 8] = rng.random();
    for group in &mut groups {
        if rng.random_bool(0.6) {
            *group = 0;
        }
    }
    if rng.random_bool(0.2) {
        groups[..6].fill(0);
        groups[5] = *[0, 0xffff, 1].choose(rng).unwrap();
    }
    groups.map(|g| format!("{g:x}")).join(":")
}

pub(crate) fn types(flavour: Flavour) -> Vec<(&'static str, Generate)> {
    let own = match flavour {
        Flavour::Mysql => MYSQL_TYPES,
        Flavour::Mariadb => MARIADB_TYPES,
    };
    TYPES.iter().chain(own).copied().collect()
}
