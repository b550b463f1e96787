//! Templates of exchange and routing key: text with `{column}` placeholders, `{{` and `}}`
//! for braces.

use std::fmt;

/// A parsed template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Template {
    parts: Vec<Part>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Part {
    Text(String),
    Column(String),
}

/// Why a template cannot be parsed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// `{` without `}`.
    #[error("the brace at byte {0} is not closed; write {{{{ for a brace")]
    Unclosed(usize),
    /// `}` without `{`.
    #[error("the closing brace at byte {0} has no opening one; write }}}} for a brace")]
    Unopened(usize),
    /// `{}`, or a name with braces in it.
    #[error("the placeholder at byte {0} names no column")]
    NoName(usize),
}

impl Template {
    /// Parses a template.
    pub fn parse(text: &str) -> Result<Self, TemplateError> {
        let (mut parts, mut plain) = (Vec::new(), String::new());
        let mut rest = text.char_indices().peekable();
        while let Some((at, c)) = rest.next() {
            match c {
                '{' if rest.next_if(|(_, c)| *c == '{').is_some() => plain.push('{'),
                '}' if rest.next_if(|(_, c)| *c == '}').is_some() => plain.push('}'),
                '}' => return Err(TemplateError::Unopened(at)),
                '{' => {
                    let mut name = String::new();
                    loop {
                        match rest.next() {
                            None | Some((_, '{')) => return Err(TemplateError::Unclosed(at)),
                            Some((_, '}')) => break,
                            Some((_, c)) => name.push(c),
                        }
                    }
                    if name.trim().is_empty() {
                        return Err(TemplateError::NoName(at));
                    }
                    if !plain.is_empty() {
                        parts.push(Part::Text(std::mem::take(&mut plain)));
                    }
                    parts.push(Part::Column(name.trim().to_owned()));
                }
                c => plain.push(c),
            }
        }
        if !plain.is_empty() {
            parts.push(Part::Text(plain));
        }
        Ok(Self { parts })
    }

    /// Names of the columns that it needs, in order, possibly repeated.
    pub fn columns(&self) -> impl Iterator<Item = &str> {
        self.parts.iter().filter_map(|p| match p {
            Part::Column(c) => Some(c.as_str()),
            Part::Text(_) => None,
        })
    }

    /// The text, where the template has no placeholder.
    #[must_use]
    pub fn as_static(&self) -> Option<&str> {
        match self.parts.as_slice() {
            [] => Some(""),
            [Part::Text(t)] => Some(t),
            _ => None,
        }
    }

    /// Renders with the given values; the error is the first column without a value.
    pub fn render(&self, mut value: impl FnMut(&str, &mut String) -> bool) -> Result<String, &str> {
        let mut out = String::new();
        for part in &self.parts {
            match part {
                Part::Text(t) => out.push_str(t),
                Part::Column(c) => {
                    if !value(c, &mut out) {
                        return Err(c);
                    }
                }
            }
        }
        Ok(out)
    }
}

impl fmt::Display for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for part in &self.parts {
            match part {
                Part::Text(t) => f.write_str(&t.replace('{', "{{").replace('}', "}}"))?,
                Part::Column(c) => write!(f, "{{{c}}}")?,
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use proptest::prelude::*;

    use super::*;

    fn render(text: &str) -> Result<String, String> {
        let template = Template::parse(text).unwrap();
        let value = |name: &str, out: &mut String| {
            out.push_str(&name.to_uppercase());
            name != "null"
        };
        template.render(value).map_err(str::to_owned)
    }

    #[test]
    fn placeholders_and_doubled_braces_are_rendered() {
        for (text, rendered) in [
            ("", ""),
            ("orders", "orders"),
            ("{a}.{ b }", "A.B"),
            ("{{{a}}}", "{A}"),
            ("{{a}}", "{a}"),
        ] {
            assert_eq!(render(text).unwrap(), rendered, "{text}");
        }
        assert_eq!(render("{a}{null}{b}"), Err("null".to_owned()));
    }

    #[test]
    fn a_broken_template_says_where() {
        for (text, error) in [
            ("a{b", TemplateError::Unclosed(1)),
            ("{a{b}", TemplateError::Unclosed(0)),
            ("a}b", TemplateError::Unopened(1)),
            ("a{ }", TemplateError::NoName(1)),
        ] {
            assert_eq!(Template::parse(text), Err(error), "{text}");
        }
    }

    proptest! {
        #[test]
        fn a_template_reads_back_as_it_prints(text in "[{}a b.é]{0,20}") {
            if let Ok(template) = Template::parse(&text) {
                prop_assert_eq!(Template::parse(&template.to_string()), Ok(template.clone()));
                prop_assert_eq!(template.as_static().is_some(), template.columns().next().is_none());
                if let Some(plain) = template.as_static() {
                    prop_assert_eq!(render(&text).unwrap(), plain);
                }
            }
        }
    }
}
