//! Errors as `application/problem+json` (RFC 9457).

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use outbox_core::ports::{Disposition, PortError, chain};
use serde_json::json;

/// An error of the API.
#[derive(Debug)]
pub struct Problem {
    status: StatusCode,
    detail: String,
}

impl Problem {
    /// A problem with its explanation, which holds no secret.
    pub fn new(status: StatusCode, detail: impl Into<String>) -> Self {
        Self {
            status,
            detail: detail.into(),
        }
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
        let body = json!({ "type": "about:blank", "title": title, "status": self.status.as_u16(), "detail": self.detail });
        let kind = HeaderValue::from_static("application/problem+json");
        (
            self.status,
            [(header::CONTENT_TYPE, kind)],
            body.to_string(),
        )
            .into_response()
    }
}
