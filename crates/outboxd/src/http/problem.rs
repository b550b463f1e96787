//! Errors as `application/problem+json` (RFC 9457).

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use outbox_core::ports::{Disposition, PortError, chain};
use serde_json::{Value, json};

/// An error of the API.
#[derive(Debug)]
pub struct Problem {
    status: StatusCode,
    detail: String,
    more: Option<(&'static str, Value)>,
}

impl Problem {
    /// A problem with its explanation, which holds no secret.
    pub fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        Self {
            status,
            detail: detail.into(),
            more: None,
        }
    }

    /// The same with one more member.
    pub fn with(mut self, name: &'static str, value: Value) -> Self {
        self.more = Some((name, value));
        self
    }

    /// What a layer or the framework refused; it is told by the status alone.
    pub fn generic(status: StatusCode) -> Self {
        let detail = match status {
            StatusCode::BAD_REQUEST => "the request could not be read",
            StatusCode::PAYLOAD_TOO_LARGE => "the body is over 64 KiB",
            StatusCode::SERVICE_UNAVAILABLE => "no answer in time; MySQL, most likely",
            _ => "the request was refused",
        };
        Self::new(status, detail)
    }

    /// 404.
    pub fn not_found(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::NOT_FOUND, detail)
    }

    /// 400.
    pub fn bad(detail: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, detail)
    }
}

impl From<PortError> for Problem {
    fn from(e: PortError) -> Self {
        let status = match e.disposition {
            Disposition::Backoff => StatusCode::SERVICE_UNAVAILABLE,
            Disposition::Fenced => StatusCode::CONFLICT,
            Disposition::Halt => StatusCode::INTERNAL_SERVER_ERROR,
        };
        Self::new(status, chain(&e))
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        let title = self.status.canonical_reason().unwrap_or("Error");
        let mut body = json!({ "type": "about:blank", "title": title, "status": self.status.as_u16(), "detail": self.detail });
        if let Some((name, value)) = self.more {
            body[name] = value;
        }
        let kind = HeaderValue::from_static("application/problem+json");
        let mut response = (
            self.status,
            [(header::CONTENT_TYPE, kind)],
            body.to_string(),
        )
            .into_response();
        if self.status == StatusCode::UNAUTHORIZED {
            let bearer = HeaderValue::from_static("Bearer realm=\"outboxd\"");
            response
                .headers_mut()
                .insert(header::WWW_AUTHENTICATE, bearer);
        }
        response
    }
}
