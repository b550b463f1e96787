//! The console and the runbook: pages that need nothing from elsewhere.
//!
//! The console is one document of markup, style and script, kept in three files. The policy
//! allows exactly this style and this script, by their hashes, and no HTML made from strings.

use std::sync::LazyLock;

use axum::http::{HeaderName, HeaderValue};
use axum::response::{Html, IntoResponse, Response};
use openssl::base64::encode_block;
use openssl::sha::sha256;
use pulldown_cmark::{CowStr, Event, HeadingLevel, Options, Parser, Tag, TagEnd, html};

const STYLE: &str = include_str!("console.css");
const SCRIPT: &str = include_str!("console.js");
const RUNBOOK: &str = include_str!("../../../../docs/operations.md");

static CONSOLE: LazyLock<String> = LazyLock::new(|| {
    include_str!("console.html")
        .replace("{style}", STYLE)
        .replace("{script}", SCRIPT)
});

static RUNBOOK_PAGE: LazyLock<String> = LazyLock::new(|| {
    let mut body = String::new();
    html::push_html(&mut body, with_anchors(RUNBOOK).into_iter());
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <title>outboxd: operations</title><style>{STYLE}</style></head>\
         <body><main class=\"text\"><p><a href=\"./\">back to the console</a></p>{body}</main></body></html>"
    )
});

static POLICY: LazyLock<Option<HeaderValue>> = LazyLock::new(|| {
    let hash = |text: &str| format!("'sha256-{}'", encode_block(&sha256(text.as_bytes())));
    let policy = format!(
        "default-src 'none'; script-src {}; style-src {}; img-src data:; connect-src 'self'; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; \
         trusted-types 'none'",
        hash(SCRIPT),
        hash(STYLE)
    );
    HeaderValue::from_str(&policy).ok()
});

/// The console.
pub(super) async fn console() -> Response {
    page(&CONSOLE)
}

/// `docs/operations.md` as a page; every heading is an anchor.
pub(super) async fn runbook() -> Response {
    page(&RUNBOOK_PAGE)
}

fn page(text: &'static str) -> Response {
    let mut response = Html(text).into_response();
    if let Some(policy) = &*POLICY {
        let name = HeaderName::from_static("content-security-policy");
        response.headers_mut().insert(name, policy.clone());
    }
    response
}

fn with_anchors(text: &str) -> Vec<Event<'_>> {
    let mut image = false;
    // Pictures are not in the binary.
    let shown = Parser::new_ext(text, Options::ENABLE_TABLES).filter(|event| match event {
        Event::Start(Tag::Image { .. }) => {
            image = true;
            false
        }
        Event::End(TagEnd::Image) => {
            image = false;
            false
        }
        _ => !image,
    });
    let mut events: Vec<Event<'_>> = shown.collect();
    let headings: Vec<(usize, String)> = headings(&events);
    for (at, slug) in headings {
        if let Event::Start(Tag::Heading { id, .. }) = &mut events[at] {
            *id = Some(CowStr::from(slug));
        }
    }
    events
}

/// Where each heading begins, and its anchor: the words in lower case, joined by hyphens.
fn headings(events: &[Event<'_>]) -> Vec<(usize, String)> {
    let mut found: Vec<(usize, String)> = Vec::new();
    let mut open = false;
    for (at, event) in events.iter().enumerate() {
        match event {
            Event::Start(Tag::Heading { level, .. }) if *level != HeadingLevel::H1 => {
                found.push((at, String::new()));
                open = true;
            }
            Event::End(TagEnd::Heading(_)) => open = false,
            Event::Text(text) | Event::Code(text) if open => {
                if let Some((_, slug)) = found.last_mut() {
                    slug.extend(text.chars().filter_map(slugged));
                }
            }
            _ => {}
        }
    }
    found
}

fn slugged(c: char) -> Option<char> {
    match c {
        ' ' | '-' => Some('-'),
        '_' => Some('_'),
        c if c.is_alphanumeric() => Some(c.to_ascii_lowercase()),
        _ => None,
    }
}

/// The anchors of the runbook.
#[cfg(test)]
pub(super) fn anchors() -> Vec<String> {
    let events: Vec<Event<'_>> = Parser::new_ext(RUNBOOK, Options::ENABLE_TABLES).collect();
    headings(&events)
        .into_iter()
        .map(|(_, slug)| slug)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_runbook_becomes_a_page_with_distinct_anchors() {
        let mut anchors = anchors();
        assert!(anchors.len() > 10, "{anchors:?}");
        for anchor in &anchors {
            assert!(
                RUNBOOK_PAGE.contains(&format!("id=\"{anchor}\"")),
                "{anchor}"
            );
        }
        let all = anchors.len();
        anchors.sort_unstable();
        anchors.dedup();
        assert_eq!(anchors.len(), all);
        assert!(RUNBOOK_PAGE.contains("<table>") && !RUNBOOK_PAGE.contains("<img"));
    }

    #[test]
    fn links_within_the_runbook_lead_somewhere() {
        let anchors = anchors();
        for event in Parser::new_ext(RUNBOOK, Options::ENABLE_TABLES) {
            if let Event::Start(Tag::Link { dest_url, .. }) = event {
                let anchor = dest_url.strip_prefix('#');
                let there = anchor.is_some_and(|a| anchors.iter().any(|known| known == a));
                assert!(there, "{dest_url}: the page has links to itself only");
            }
        }
    }

    #[test]
    fn the_script_makes_no_markup_from_text() {
        for word in [
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
        ] {
            assert!(!SCRIPT.contains(word), "{word}");
        }
        assert!(CONSOLE.contains(SCRIPT) && CONSOLE.contains(STYLE));
        assert!(!CONSOLE.contains("https://") && !CONSOLE.contains(" onclick="));
    }
}
