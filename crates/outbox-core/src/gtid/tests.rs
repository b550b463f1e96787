#![allow(clippy::unwrap_used)]

use proptest::prelude::*;

use super::*;

const A: &str = "3e11fa47-71ca-11e1-9e33-c80aa9429562";
const B: &str = "fe11fa47-71ca-11e1-9e33-c80aa9429562";
const TAGS: [&str; 3] = ["", "t", "u_1"];
const NUMBERS: usize = 20;

/// The model: one bit for each transaction of two sources with three tags.
type Bits = [[bool; NUMBERS]; 6];

fn gtid(lane: usize, n: usize) -> Gtid {
    let source = parse_uuid([A, B][lane / 3]).unwrap();
    Gtid {
        source,
        tag: TAGS[lane % 3].to_owned(),
        number: u64::try_from(n).unwrap() + 1,
    }
}

fn all() -> impl Iterator<Item = (usize, usize)> {
    (0..6).flat_map(|lane| (0..NUMBERS).map(move |n| (lane, n)))
}

fn bits(set: &GtidSet) -> Bits {
    let mut bits = Bits::default();
    for (lane, n) in all() {
        bits[lane][n] = set.contains(&gtid(lane, n));
    }
    bits
}

fn combine(a: &Bits, b: &Bits, f: impl Fn(bool, bool) -> bool) -> Bits {
    let mut bits = Bits::default();
    for (lane, n) in all() {
        bits[lane][n] = f(a[lane][n], b[lane][n]);
    }
    bits
}

/// Sets as they grow: one transaction at a time, in any order.
fn any_set() -> impl Strategy<Value = (GtidSet, Bits)> {
    proptest::collection::vec((0..6_usize, 0..NUMBERS), 0..60).prop_map(|adds| {
        let (mut set, mut bits) = (GtidSet::default(), Bits::default());
        for (lane, n) in adds {
            assert_eq!(set.add(&gtid(lane, n)), !bits[lane][n]);
            bits[lane][n] = true;
        }
        (set, bits)
    })
}

proptest! {
    #[test]
    fn arithmetic_agrees_with_a_bitset((a, a_bits) in any_set(), (b, b_bits) in any_set()) {
        prop_assert_eq!(bits(&a), a_bits);
        let count = all().filter(|&(lane, n)| a_bits[lane][n]).count();
        prop_assert_eq!(a.len(), u64::try_from(count).unwrap());
        prop_assert_eq!(a.is_empty(), count == 0);
        let both = {
            let mut both = a.clone();
            both.merge(&b);
            both
        };
        let left = a.subtract(&b);
        prop_assert_eq!(bits(&both), combine(&a_bits, &b_bits, |a, b| a || b));
        prop_assert_eq!(bits(&left), combine(&a_bits, &b_bits, |a, b| a && !b));
        let contained = all().all(|(lane, n)| a_bits[lane][n] || !b_bits[lane][n]);
        prop_assert_eq!(a.contains_all(&b), contained);
        prop_assert!(both.contains_all(&a) && both.contains_all(&b) && a.contains_all(&left));
        // The normal form is unique, whatever way led to it.
        for set in [&both, &left] {
            prop_assert_eq!(&set.to_string().parse::<GtidSet>().unwrap(), set);
        }
    }

    #[test]
    fn text_of_any_kind_never_panics(text in "[0-9a-f:,\\-t_ \n]{0,80}|.{0,40}") {
        if let Ok(set) = text.parse::<GtidSet>() {
            prop_assert_eq!(set.to_string().parse::<GtidSet>().unwrap(), set);
        }
    }
}

#[test]
fn what_servers_print_is_read_and_printed_in_normal_form() {
    let cases = [
        ("", String::new()),
        (" \n", String::new()),
        ("A:1", format!("{A}:1")),
        ("A:1-5:7", format!("{A}:1-5:7")),
        ("A:1-5,\nB:3", format!("{A}:1-5,{B}:3")),
        ("B:3 , A : 1 - 5 ,", format!("{A}:1-5,{B}:3")),
        ("A:1-3,A:4,A:9", format!("{A}:1-4:9")),
        ("A:1-5:tag:1-3:5:Zed:2", format!("{A}:1-5:tag:1-3:5:zed:2")),
        ("A:tag:1-3,A:1", format!("{A}:1:tag:1-3")),
        ("A:_x:1", format!("{A}:_x:1")),
        (
            "A:1-9223372036854775806",
            format!("{A}:1-9223372036854775806"),
        ),
    ];
    for (text, printed) in cases {
        let text = text.replace('A', &A.to_uppercase()).replace('B', B);
        let set: GtidSet = text.parse().unwrap();
        assert_eq!(set.to_string(), printed, "{text:?}");
    }
}

#[test]
fn what_is_no_set_is_refused() {
    let tag = "t".repeat(33);
    for text in [
        "A",
        "A:",
        "A:0",
        "A:5-3",
        "A:1-",
        "A:-1",
        "A:+1",
        "A:1-2-3",
        "A:tag",
        "A:tag:",
        "A:tag:u:1",
        "A:1:tag",
        "A:9223372036854775807",
        "A:99999999999999999999",
        "A:t-g:1",
        ":1",
        "x:1",
        &format!("A:{tag}:1"),
        "3e11fa4771ca11e19e33c80aa9429562:1",
        "3e11fa47-71ca-11e1-9e33-c80aa942956é:1",
        "A;1",
        "A:1 2",
    ] {
        let text = text.replace('A', A);
        assert!(text.parse::<GtidSet>().is_err(), "{text:?}");
    }
    let long = "x".repeat(1 << 20).parse::<GtidSet>().unwrap_err();
    assert!(long.to_string().len() < 200);
}

#[test]
fn sids_come_in_order_with_half_open_intervals() {
    let set: GtidSet = format!("{B}:4-6,{A}:tag:9,{A}:1:3-4").parse().unwrap();
    let sids: Vec<_> = set
        .sids()
        .map(|s| (s.source[0], s.tag.to_owned(), s.intervals.to_vec()))
        .collect();
    let expected = vec![
        (0x3e, String::new(), vec![(1, 2), (3, 5)]),
        (0x3e, "tag".to_owned(), vec![(9, 10)]),
        (0xfe, String::new(), vec![(4, 7)]),
    ];
    assert_eq!(sids, expected);
}

#[test]
fn numbers_that_no_server_gives_are_not_added() {
    let mut set = GtidSet::default();
    for number in [0, u64::MAX, 1 << 63] {
        let mut gtid = gtid(0, 0);
        gtid.number = number;
        assert!(!set.add(&gtid) && !set.contains(&gtid));
    }
    assert!(set.is_empty());
}
