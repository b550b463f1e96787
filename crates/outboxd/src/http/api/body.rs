//! Bodies of orders: JSON, or none.

use std::sync::Arc;

use axum::extract::{FromRequest, Request};
use axum::http::{StatusCode, header};
use bytes::Bytes;
use serde::de::DeserializeOwned;

use crate::http::App;
use crate::http::problem::Problem;

/// A JSON body; without any, the default.
pub(in crate::http) struct Body<T>(pub(in crate::http) T);

impl<T: DeserializeOwned + Default> FromRequest<Arc<App>> for Body<T> {
    type Rejection = Problem;

    async fn from_request(request: Request, app: &Arc<App>) -> Result<Self, Problem> {
        let kind = request.headers().get(header::CONTENT_TYPE).cloned();
        let bytes = Bytes::from_request(request, app)
            .await
            .map_err(|e| Problem::generic(e.status()))?;
        if bytes.is_empty() {
            return Ok(Self(T::default()));
        }
        // A form that a foreign page sends cannot have this type.
        let kind = kind.as_ref().and_then(|k| k.to_str().ok()).unwrap_or("");
        let essence = kind.split(';').next().unwrap_or("").trim();
        if !essence.eq_ignore_ascii_case("application/json") {
            return Err(Problem::new(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "a body must be application/json",
            ));
        }
        serde_json::from_slice(&bytes)
            .map(Self)
            .map_err(|e| Problem::bad(format!("the body is not what is expected here: {e}")))
    }
}
