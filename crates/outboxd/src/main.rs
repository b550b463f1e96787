//! placeholder
mod config;
fn main() {}
