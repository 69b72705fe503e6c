//! `[cors]`: which pages in browsers may use the API.

use std::time::Duration;

use http::{HeaderName, HeaderValue, Method, Uri};
use keyway_wire::headers as names;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::ConfigError;
use crate::limits::CORS_MAX_AGE;

/// What of an answer a page may read unless it is told otherwise: the gateway's own names, and those of
/// limits.
const EXPOSED: [&str; 20] = [
    names::REQUEST_ID,
    names::ANTHROPIC_REQUEST_ID,
    names::WORKER,
    names::REASON,
    names::MATCHED_TOKENS,
    names::BUDGET_LEFT,
    "retry-after",
    "retry-after-ms",
    "x-ratelimit-limit-requests",
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-remaining-tokens",
    "x-ratelimit-reset-requests",
    "x-ratelimit-reset-tokens",
    "anthropic-ratelimit-requests-limit",
    "anthropic-ratelimit-requests-remaining",
    "anthropic-ratelimit-requests-reset",
    "anthropic-ratelimit-tokens-limit",
    "anthropic-ratelimit-tokens-remaining",
    "anthropic-ratelimit-tokens-reset",
];

const METHODS: [&str; 5] = ["GET", "POST", "PUT", "PATCH", "DELETE"];

/// `[cors]`: which pages in browsers may use the API.
#[derive(Debug, Clone, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct CorsFile {
    /// Origins of pages that may use the API, such as `https://chat.example.com`; `*` for all. None by
    /// default: then nothing is answered for them here, and what workers say of it passes.
    pub allow_origins: OneOrMany,
    /// Methods that they may use (GET, POST, PUT, PATCH, DELETE).
    pub allow_methods: Option<Vec<String>>,
    /// Headers that they may send; `*`, the default, for all that a page asks for, `authorization` too.
    pub allow_headers: Option<OneOrMany>,
    /// Headers of answers that they may read (`x-request-id`, `request-id`, `x-keyway-*`, `retry-after`,
    /// `x-ratelimit-*`, `anthropic-ratelimit-*`).
    pub expose_headers: Option<Vec<String>>,
    /// Whether browsers send cookies and certificates along (false).
    pub allow_credentials: bool,
    /// Seconds for which a browser need not ask again (600).
    pub max_age_s: Option<u64>,
}

/// Who may use the API from a browser, and how: `[cors]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cors {
    /// Where a page must come from to use the API.
    pub origins: Origins,
    /// Whether with cookies and certificates.
    pub credentials: bool,
    /// Methods that a page may use, as `Access-Control-Allow-Methods` lists them.
    pub methods: HeaderValue,
    /// With these headers; `None`: with those that they ask for.
    pub headers: Option<HeaderValue>,
    /// Headers of answers that they may read.
    pub exposed: HeaderValue,
    /// Seconds for which they need not ask again.
    pub max_age: HeaderValue,
}

/// Where pages come from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Origins {
    /// Anywhere (`*`): every page may; not together with `credentials`.
    Any,
    /// One of these origins, each written as browsers send it: `scheme://host[:port]`.
    Listed(Vec<HeaderValue>),
}

/// A value, or a list of them.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(untagged)]
pub enum OneOrMany {
    /// A single value, written without a list around it.
    One(String),
    /// A list of values, which may be empty.
    Many(Vec<String>),
}

impl Default for OneOrMany {
    fn default() -> Self {
        Self::Many(Vec::new())
    }
}

impl OneOrMany {
    fn all(&self) -> &[String] {
        match self {
            Self::One(one) => std::slice::from_ref(one),
            Self::Many(many) => many,
        }
    }

    fn is_any(&self) -> bool {
        self.all().iter().any(|value| value == "*")
    }
}

impl CorsFile {
    /// What follows from it; `None`: it is not answered here.
    pub fn validated(&self) -> Result<Option<Cors>, ConfigError> {
        if self.allow_origins.all().is_empty() {
            return Ok(None);
        }
        let origins = self.origins()?;
        if self.allow_credentials && origins == Origins::Any {
            let why = "with allow_credentials every page could act as its reader; list the origins";
            return Err(ConfigError(format!("cors.allow_origins may not be \"*\": {why}")));
        }
        let methods = self.allow_methods.as_deref().map(|methods| list("allow_methods", methods, is_method));
        let exposed = self.expose_headers.as_deref().map(|names| list("expose_headers", names, is_name));
        let asked = self.allow_headers.as_ref().filter(|allowed| !allowed.is_any());
        let headers = asked.map(|names| list("allow_headers", names.all(), is_name)).transpose()?;
        let max_age = self.max_age_s.map_or(CORS_MAX_AGE, Duration::from_secs);
        Ok(Some(Cors {
            origins,
            credentials: self.allow_credentials,
            methods: methods.unwrap_or_else(|| list("allow_methods", &METHODS, is_method))?,
            headers,
            exposed: exposed.unwrap_or_else(|| list("expose_headers", &EXPOSED, is_name))?,
            max_age: HeaderValue::from(max_age.as_secs()),
        }))
    }

    fn origins(&self) -> Result<Origins, ConfigError> {
        if self.allow_origins.is_any() {
            return Ok(Origins::Any);
        }
        self.allow_origins
            .all()
            .iter()
            .map(|origin| listed(origin))
            .collect::<Result<_, _>>()
            .map(Origins::Listed)
    }
}

/// An origin as browsers write it: scheme, host and port in lower case, and nothing behind.
fn listed(origin: &str) -> Result<HeaderValue, ConfigError> {
    let wrong = || {
        let expected = "expected scheme://host[:port], in lower case and without a path, or \"*\"";
        ConfigError(format!("cors.allow_origins {origin:?}: {expected}"))
    };
    let uri: Uri = origin.parse().map_err(|_| wrong())?;
    let (scheme, authority) = uri.scheme_str().zip(uri.authority()).ok_or_else(wrong)?;
    let written = format!("{scheme}://{authority}");
    let says_default = matches!((scheme, uri.port_u16()), ("http", Some(80)) | ("https", Some(443)));
    if origin != written
        || origin != origin.to_ascii_lowercase()
        || says_default
        || origin.contains(['@', '*'])
    {
        return Err(wrong());
    }
    HeaderValue::from_str(origin).map_err(|_| wrong())
}

fn list(
    key: &str,
    values: &[impl AsRef<str>],
    is_valid: fn(&str) -> bool,
) -> Result<HeaderValue, ConfigError> {
    let values: Vec<&str> = values.iter().map(AsRef::as_ref).collect();
    match values.iter().find(|value| !is_valid(value)) {
        Some(value) => Err(ConfigError(format!("cors.{key} {value:?}: it is no such name"))),
        None => HeaderValue::from_str(&values.join(", "))
            .map_err(|error| ConfigError(format!("cors.{key}: {error}"))),
    }
}

fn is_method(value: &str) -> bool {
    value == "*" || value.parse::<Method>().is_ok()
}

fn is_name(value: &str) -> bool {
    HeaderName::try_from(value).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn validated(toml: &str) -> Result<Option<Cors>, String> {
        toml::from_str::<CorsFile>(toml).expect("TOML").validated().map_err(|error| error.0)
    }

    #[test]
    fn nothing_is_answered_unless_an_origin_is_allowed() {
        assert_eq!(validated("").unwrap(), None);
        assert_eq!(validated("allow_credentials = true\nmax_age_s = 3").unwrap(), None);
        for any in ["\"*\"", "[\"*\"]", "[\"https://a.example\", \"*\"]"] {
            let cors = validated(&format!("allow_origins = {any}")).unwrap().unwrap();
            assert_eq!((cors.origins, cors.headers), (Origins::Any, None), "{any}");
        }
        let cors =
            validated("allow_origins = \"https://a.example:8443\"\nallow_headers = [\"x-a\", \"x-b\"]");
        let cors = cors.unwrap().unwrap();
        assert_eq!(cors.origins, Origins::Listed(vec![HeaderValue::from_static("https://a.example:8443")]));
        assert_eq!(cors.headers, Some(HeaderValue::from_static("x-a, x-b")));
        assert_eq!((cors.max_age, cors.credentials), (HeaderValue::from_static("600"), false));
    }

    #[test]
    fn what_no_browser_would_match_or_all_would_is_refused_by_its_key() {
        for (toml, names) in [
            ("allow_origins = \"*\"\nallow_credentials = true", "allow_credentials"),
            ("allow_origins = [\"https://a.example/\"]", "https://a.example/"),
            ("allow_origins = [\"https://A.example\"]", "A.example"),
            ("allow_origins = [\"https://a.example:443\"]", ":443"),
            ("allow_origins = [\"http://a.example:80\"]", ":80"),
            ("allow_origins = [\"a.example\"]", "a.example"),
            ("allow_origins = [\"https://*.example\"]", "*.example"),
            ("allow_origins = [\"https://u@a.example\"]", "u@"),
            ("allow_origins = [\"null\"]", "null"),
            ("allow_origins = [\"\"]", "allow_origins"),
            ("allow_origins = \"*\"\nallow_methods = [\"GE T\"]", "allow_methods"),
            ("allow_origins = \"*\"\nallow_headers = [\"a b\"]", "allow_headers"),
            ("allow_origins = \"*\"\nexpose_headers = [\"\"]", "expose_headers"),
        ] {
            let error = validated(toml).expect_err(toml);
            assert!(error.contains(names), "{toml}: {error}");
        }
    }
}
