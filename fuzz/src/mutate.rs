//! Changes to bytes that tend to reach the edges of a parser.

use rand::prelude::*;

const BYTES: [u8; 10] = [0, 1, 2, 7, 0x7f, 0x80, 0xfb, 0xfc, 0xfe, 0xff];
const WORDS: [u32; 8] = [
    0,
    1,
    0xff,
    0xffff,
    0x7fff_ffff,
    0x8000_0000,
    0xffff_fffe,
    0xffff_ffff,
];

/// One to five changes.
pub fn mutate(bytes: &mut Vec<u8>, rng: &mut StdRng) {
    for _ in 0..rng.random_range(1..=5) {
        let Some(at) = (0..bytes.len()).choose(rng) else {
            bytes.push(rng.random());
            continue;
        };
        match rng.random_range(0..9) {
            0 => bytes[at] ^= 1 << rng.random_range(0..8),
            1 => bytes[at] = rng.random(),
            2 | 3 => bytes[at] = BYTES[rng.random_range(0..BYTES.len())],
            4 => bytes.truncate(at),
            5 => {
                bytes.remove(at);
            }
            6 => bytes.insert(at, rng.random()),
            7 => {
                let word = WORDS[rng.random_range(0..WORDS.len())].to_le_bytes();
                let width = [2, 3, 4][rng.random_range(0..3)].min(bytes.len() - at);
                bytes[at..at + width].copy_from_slice(&word[..width]);
            }
            _ => {
                // A piece moves elsewhere.
                let end = (at + rng.random_range(1..32)).min(bytes.len());
                let piece = bytes[at..end].to_vec();
                let to = rng.random_range(0..=bytes.len());
                bytes.splice(to..to, piece);
            }
        }
    }
}
