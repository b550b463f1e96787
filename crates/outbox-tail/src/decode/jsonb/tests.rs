#![allow(clippy::unwrap_used)]

use super::*;

fn text(data: &[u8]) -> String {
    String::from_utf8(to_text(data).unwrap().to_vec()).unwrap()
}

#[test]
fn a_document_as_the_server_stores_it_prints_with_its_spaces() {
    // {"x": [1, 2]}, taken from a binlog.
    let data = [
        0x00, 0x01, 0x00, 0x16, 0x00, 0x0b, 0x00, 0x01, 0x00, 0x02, 0x0c, 0x00, 0x78, 0x02, 0x00,
        0x0a, 0x00, 0x05, 0x01, 0x00, 0x05, 0x02, 0x00,
    ];
    assert_eq!(text(&data), r#"{"x": [1, 2]}"#);
}

#[test]
fn scalars_print_as_the_server_prints_them() {
    for (data, expected) in [
        (&[][..], "null"),
        (&[4, 0], "null"),
        (&[4, 1], "true"),
        (&[5, 0xff, 0xff], "-1"),
        (&[6, 0xff, 0xff], "65535"),
        (&[7, 0, 0, 0, 0x80], "-2147483648"),
        (&[9, 0, 0, 0, 0, 0, 0, 0, 0x80], "-9223372036854775808"),
        (
            &[10, 255, 255, 255, 255, 255, 255, 255, 255],
            "18446744073709551615",
        ),
        (&[11, 0, 0, 0, 0, 0, 0, 0, 0x40], "2.0"),
        (&[12, 3, b'"', 1, b'\n'], r#""\"\u0001\n""#),
        (&[15, 246, 4, 4, 2, 0x81, 50], "1.50"),
        (&[15, 16, 1, 0x55], r#""base64:type16:VQ==""#),
        (&[15, 253, 1, b'a'], r#""a""#),
        (
            &[15, 12, 8, 0, 0, 0, 0, 0, 0, 0, 0],
            r#""0000-00-00 00:00:00.000000""#,
        ),
        (
            &[15, 11, 8, 0, 0, 0, 0xff, 0xff, 0xff, 0xff, 0xff],
            r#""-00:00:01.000000""#,
        ),
    ] {
        assert_eq!(text(data), expected);
    }
}

#[test]
fn long_base64_is_broken_into_lines_as_the_server_does() {
    let mut data = vec![15, 252, 60];
    data.extend([0; 60]);
    assert_eq!(
        text(&data),
        format!(r#""base64:type252:{}\nAAAA""#, "A".repeat(76))
    );
}

#[test]
fn offsets_and_sizes_that_lie_are_refused() {
    for data in [
        &[0_u8][..],
        &[2, 1, 0, 7, 0, 12, 0xff, 0xff],
        &[2, 0xff, 0xff, 4, 0],
        &[3, 0xff, 0xff, 0xff, 0xff, 8, 0, 0, 0],
        &[0, 1, 0, 11, 0, 0xff, 0, 1, 0, 4, 0, 0],
        &[12, 0xff, 0xff, 0xff, 0xff, 0xff],
        &[12, 5, b'a'],
        &[12, 1, 0xff],
        &[4, 9],
        &[14],
        &[15, 246, 1, 4],
    ] {
        assert_eq!(to_text(data), Err(BAD), "{data:x?}");
    }
}

#[test]
fn an_array_that_contains_itself_ends() {
    // One element: an array at offset 0, which is this one.
    assert_eq!(to_text(&[2, 1, 0, 7, 0, 2, 0, 0]), Err(BAD));
}

#[test]
fn values_that_share_bytes_cannot_multiply_the_output() {
    // 200 elements, all of them the same long string at the end.
    let (count, string) = (200_u16, 5_000_u16);
    let offset = 4 + count * 3;
    let mut data = vec![2];
    data.extend(count.to_le_bytes());
    data.extend((offset + string + 2).to_le_bytes());
    for _ in 0..count {
        data.push(12);
        data.extend(offset.to_le_bytes());
    }
    data.extend([0x88, 0x27]);
    data.extend(vec![b'x'; usize::from(string)]);
    assert_eq!(to_text(&data), Err(BAD));
}

#[test]
fn nesting_deeper_than_the_server_allows_is_refused() {
    let nested = |depth: u16| {
        let mut data = vec![2];
        for level in (0..depth).rev() {
            let count = u16::from(level > 0);
            data.extend(count.to_le_bytes());
            data.extend((4 + 7 * level).to_le_bytes());
            if level > 0 {
                data.push(2);
                data.extend(7_u16.to_le_bytes());
            }
        }
        data
    };
    assert_eq!(text(&nested(3)), "[[[]]]");
    assert!(to_text(&nested(100)).is_ok());
    assert_eq!(to_text(&nested(101)), Err(BAD));
}
