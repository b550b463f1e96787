//! The least of an HTTP/1.1 client that a test needs: one request per connection.

use std::time::Duration;

use anyhow::{Context, Result, bail};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const TIMEOUT: Duration = Duration::from_secs(10);
const LARGEST: u64 = 64 << 20;

/// An answer.
#[derive(Debug, Clone)]
pub struct Response {
    /// The status code.
    pub status: u16,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    /// The body, as text.
    pub body: String,
}

impl Response {
    /// The value of a header, by its name in lower case.
    #[must_use]
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers
            .iter()
            .find(|(key, _)| key == name)
            .map(|(_, value)| value.as_str())
    }

    /// The body as JSON.
    ///
    /// # Errors
    /// It is not.
    pub fn json(&self) -> Result<serde_json::Value> {
        serde_json::from_str(&self.body).with_context(|| format!("not JSON: {}", self.body))
    }
}

/// Sends a request to 127.0.0.1:`port` and reads the whole answer, within 10 s.
///
/// # Errors
/// No connection, or an answer that is not HTTP.
pub async fn request(
    port: u16,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> Result<Response> {
    request_within(TIMEOUT, port, method, path, headers, body).await
}

/// The same with another limit of time. A header `host` takes the place of the usual one.
///
/// # Errors
/// As [`request`].
pub async fn request_within(
    limit: Duration,
    port: u16,
    method: &str,
    path: &str,
    headers: &[(&str, &str)],
    body: &str,
) -> Result<Response> {
    let exchange = async {
        let mut socket = TcpStream::connect(("127.0.0.1", port)).await?;
        let mut head = format!("{method} {path} HTTP/1.1\r\nconnection: close\r\n");
        if !headers.iter().any(|(name, _)| *name == "host") {
            head.push_str(&format!("host: 127.0.0.1:{port}\r\n"));
        }
        for (name, value) in headers {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str(&format!("content-length: {}\r\n\r\n{body}", body.len()));
        socket.write_all(head.as_bytes()).await?;
        let (mut answer, mut socket) = (Vec::new(), socket.take(LARGEST));
        // A server that keeps the connection open all the same has said how long the body is.
        while !is_whole(&answer) {
            if socket.read_buf(&mut answer).await? == 0 {
                break;
            }
        }
        parse(&answer)
    };
    let what = || format!("{method} {path} on port {port}");
    tokio::time::timeout(limit, exchange)
        .await
        .with_context(what)?
        .with_context(what)
}

fn is_whole(answer: &[u8]) -> bool {
    let Some(end) = answer.windows(4).position(|four| four == b"\r\n\r\n") else {
        return false;
    };
    let head = String::from_utf8_lossy(&answer[..end]).to_ascii_lowercase();
    let length = head
        .lines()
        .find_map(|line| line.strip_prefix("content-length:"))
        .and_then(|length| length.trim().parse::<usize>().ok());
    length.is_some_and(|length| answer.len() >= end + 4 + length)
}

fn parse(answer: &[u8]) -> Result<Response> {
    let end = answer
        .windows(4)
        .position(|four| four == b"\r\n\r\n")
        .context("no end of the head")?;
    let (head, body) = answer.split_at(end + 4);
    let head = std::str::from_utf8(head)?;
    let mut lines = head.lines();
    let status = lines
        .next()
        .and_then(|line| line.split(' ').nth(1))
        .context("no status")?
        .parse()?;
    let headers: Vec<(String, String)> = lines
        .filter_map(|line| line.split_once(':'))
        .map(|(name, value)| (name.to_ascii_lowercase(), value.trim().to_owned()))
        .collect();
    let chunked = headers
        .iter()
        .any(|(name, value)| name == "transfer-encoding" && value == "chunked");
    let body = if chunked {
        unchunk(body)?
    } else {
        body.to_vec()
    };
    Ok(Response {
        status,
        headers,
        body: String::from_utf8(body)?,
    })
}

fn unchunk(mut rest: &[u8]) -> Result<Vec<u8>> {
    let mut body = Vec::new();
    loop {
        let line = rest
            .windows(2)
            .position(|two| two == b"\r\n")
            .context("a chunk without a size")?;
        let size = usize::from_str_radix(std::str::from_utf8(&rest[..line])?.trim(), 16)?;
        rest = &rest[line + 2..];
        if size == 0 {
            return Ok(body);
        }
        if rest.len() < size + 2 {
            bail!("a chunk is cut short");
        }
        body.extend_from_slice(&rest[..size]);
        rest = &rest[size + 2..];
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn a_plain_and_a_chunked_answer_are_read() {
        let plain = parse(b"HTTP/1.1 404 Not Found\r\nContent-Type: a/b\r\n\r\nno").unwrap();
        assert_eq!(
            (
                plain.status,
                plain.header("content-type"),
                plain.body.as_str()
            ),
            (404, Some("a/b"), "no")
        );
        let chunked = parse(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n");
        assert_eq!(chunked.unwrap().body, "abcde");
        assert!(
            parse(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n9\r\nabc\r\n").is_err()
        );
    }
}
