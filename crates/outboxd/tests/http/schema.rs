//! Whether an answer is what `docs/openapi.json` says: as much of JSON Schema as that document uses.

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

pub struct Document(pub Value);

impl Document {
    /// The schema of an answer, `None` where it has none.
    pub fn answer(&self, path: &str, method: &str, status: u16) -> Result<(&Value, String)> {
        let answers = &self.0["paths"][path][method]["responses"];
        let answer = self.resolve(&answers[status.to_string()])?;
        let content = answer["content"]
            .as_object()
            .with_context(|| format!("{method} {path} has no answer {status}"))?;
        let (kind, body) = content.iter().next().context("no content")?;
        Ok((&body["schema"], kind.clone()))
    }

    fn resolve<'a>(&'a self, schema: &'a Value) -> Result<&'a Value> {
        match schema["$ref"].as_str() {
            None => Ok(schema),
            Some(to) => {
                let pointer = to.strip_prefix('#').context("a reference elsewhere")?;
                self.0
                    .pointer(pointer)
                    .with_context(|| format!("{to} leads nowhere"))
            }
        }
    }

    pub fn check(&self, schema: &Value, value: &Value, at: &str) -> Result<()> {
        let schema = self.resolve(schema)?;
        for part in schema["allOf"].as_array().into_iter().flatten() {
            self.check(part, value, at)?;
        }
        if let Some(allowed) = schema["enum"].as_array() {
            ensure!(
                allowed.contains(value),
                "{at}: {value} is none of {allowed:?}"
            );
        }
        let types: Vec<&str> = match &schema["type"] {
            Value::String(one) => vec![one],
            Value::Array(several) => several.iter().filter_map(Value::as_str).collect(),
            _ => Vec::new(),
        };
        let is = match value {
            Value::Null => "null",
            Value::Bool(_) => "boolean",
            Value::Number(n) if n.is_i64() || n.is_u64() => "integer",
            Value::Number(_) => "number",
            Value::String(_) => "string",
            Value::Array(_) => "array",
            Value::Object(_) => "object",
        };
        let fits = types.contains(&is) || (is == "integer" && types.contains(&"number"));
        ensure!(types.is_empty() || fits, "{at}: {value} is no {types:?}");
        for (n, item) in value.as_array().into_iter().flatten().enumerate() {
            self.check(&schema["items"], item, &format!("{at}[{n}]"))?;
        }
        if let Some(members) = value.as_object() {
            for name in schema["required"]
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(Value::as_str)
            {
                ensure!(members.contains_key(name), "{at}: {name} is missing");
            }
            for (name, member) in members {
                match schema["properties"].get(name) {
                    Some(schema) => self.check(schema, member, &format!("{at}.{name}"))?,
                    None if schema["additionalProperties"] == Value::Bool(false) => {
                        bail!("{at}: {name} is not described")
                    }
                    None => {}
                }
            }
        }
        Ok(())
    }
}
