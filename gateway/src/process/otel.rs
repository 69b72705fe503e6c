//! OpenTelemetry's own environment variables, for what neither file nor flag says of traces
//! (opentelemetry.io: "OpenTelemetry Environment Variable Specification" and "OpenTelemetry Protocol
//! Exporter"). An empty one counts as unset. The variables of traces alone go before those of all signals.

use percent_encoding::percent_decode_str;

use crate::config::{ConfigError, TracesFile};

/// Path of traces, which the variable for their endpoint has and `traces.otlp_endpoint` has not.
const TRACES_PATH: &str = "/v1/traces";

/// Fills in what `traces` does not say, from the variables.
///
/// # Errors
/// Names the variable whose value cannot be used.
pub(super) fn fill(
    traces: &mut TracesFile,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<(), ConfigError> {
    let variables = Variables(variable);
    if traces.otlp_endpoint.is_none() {
        traces.otlp_endpoint = variables.endpoint()?;
    }
    if traces.otlp_endpoint.is_none() {
        return Ok(());
    }
    if traces.ca_file.is_none() {
        traces.ca_file = variables.of_export("CERTIFICATE").map(|(_, path)| path.into());
    }
    if let Some((name, headers)) = variables.of_export("HEADERS") {
        traces.headers = pairs(&name, &headers)?;
    }
    let mut attributes = match variables.get("OTEL_RESOURCE_ATTRIBUTES") {
        Some(text) => pairs("OTEL_RESOURCE_ATTRIBUTES", &text)?,
        None => Vec::new(),
    };
    let named = attributes.iter().position(|(name, _)| name == "service.name");
    let named = named.map(|place| attributes.remove(place).1);
    traces.service_name = traces.service_name.take().or(variables.get("OTEL_SERVICE_NAME")).or(named);
    for (name, value) in attributes {
        traces.resource.entry(name).or_insert(value);
    }
    variables.sample(traces)
}

struct Variables<F>(F);

impl<F: Fn(&str) -> Option<String>> Variables<F> {
    fn get(&self, name: &str) -> Option<String> {
        (self.0)(name).map(|value| value.trim().to_owned()).filter(|value| !value.is_empty())
    }

    /// A variable of the exporter, and its whole name.
    fn of_export(&self, what: &str) -> Option<(String, String)> {
        let names = [format!("OTEL_EXPORTER_OTLP_TRACES_{what}"), format!("OTEL_EXPORTER_OTLP_{what}")];
        names.into_iter().find_map(|name| self.get(&name).map(|value| (name, value)))
    }

    /// Where traces go, without their path.
    fn endpoint(&self) -> Result<Option<String>, ConfigError> {
        let is_off = self.get("OTEL_SDK_DISABLED").is_some_and(|value| value.eq_ignore_ascii_case("true"));
        let exporter = self.get("OTEL_TRACES_EXPORTER");
        if is_off || exporter.is_some_and(|exporter| exporter != "otlp") {
            return Ok(None);
        }
        let Some((name, endpoint)) = self.of_export("ENDPOINT") else { return Ok(None) };
        if let Some((name, protocol)) = self.of_export("PROTOCOL")
            && protocol != "http/protobuf"
        {
            return Err(ConfigError(format!(
                "{name}={protocol}: traces go by http/protobuf alone, mostly to port 4318; with another \
                 collector set traces.otlp_endpoint, or OTEL_TRACES_EXPORTER=none for no traces"
            )));
        }
        if !name.contains("_TRACES_") {
            return Ok(Some(endpoint));
        }
        match endpoint.trim_end_matches('/').strip_suffix(TRACES_PATH) {
            Some(base) => Ok(Some(base.to_owned())),
            None => Err(ConfigError(format!("{name}={endpoint}: it must end with {TRACES_PATH}"))),
        }
    }

    /// Which traces are recorded.
    fn sample(&self, traces: &mut TracesFile) -> Result<(), ConfigError> {
        let Some(sampler) = self.get("OTEL_TRACES_SAMPLER") else { return Ok(()) };
        let (follows, kind) = match sampler.strip_prefix("parentbased_") {
            Some(kind) => (true, kind),
            None => (false, &*sampler),
        };
        let share = match kind {
            "always_on" => 1.0,
            "always_off" => 0.0,
            "traceidratio" => {
                let text = self.get("OTEL_TRACES_SAMPLER_ARG").unwrap_or_else(|| "1".to_owned());
                let wrong = |_| ConfigError(format!("OTEL_TRACES_SAMPLER_ARG={text}: it is no number"));
                text.parse().map_err(wrong)?
            }
            _ => {
                return Err(ConfigError(format!(
                    "OTEL_TRACES_SAMPLER={sampler}: expected always_on, always_off or traceidratio, or one of \
                     them behind parentbased_"
                )));
            }
        };
        traces.sample = traces.sample.or(Some(share));
        traces.follow_client = traces.follow_client.or(Some(follows));
        Ok(())
    }
}

/// `name=value` between commas, with `%` for odd characters.
fn pairs(variable: &str, text: &str) -> Result<Vec<(String, String)>, ConfigError> {
    let parts = text.split(',').map(str::trim).filter(|part| !part.is_empty());
    let pair = |part: &str| {
        let (name, value) = part.split_once('=')?;
        let value = percent_decode_str(value.trim()).decode_utf8().ok()?;
        Some((name.trim().to_owned(), value.into_owned()))
    };
    // The value is in no message: it may be a secret.
    let wrong =
        || ConfigError(format!("{variable}: expected NAME=VALUE,NAME=VALUE, with % for odd characters"));
    parts.map(|part| pair(part).ok_or_else(wrong)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn filled(file: &str, variables: &[(&str, &str)]) -> Result<TracesFile, ConfigError> {
        let mut traces = crate::config::File::parse(file).unwrap().traces;
        let find = |name: &str| variables.iter().find(|(known, _)| *known == name);
        fill(&mut traces, |name| find(name).map(|(_, value)| (*value).to_owned()))?;
        Ok(traces)
    }

    #[test]
    fn a_collector_that_the_environment_names_is_taken() {
        for (variables, want) in [
            (&[][..], None),
            (&[("OTEL_EXPORTER_OTLP_ENDPOINT", "")], None),
            (&[("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318")], Some("http://c:4318")),
            (
                &[
                    ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318"),
                    ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "https://t/otlp/v1/traces"),
                    ("OTEL_EXPORTER_OTLP_PROTOCOL", "http/protobuf"),
                    ("OTEL_TRACES_EXPORTER", "otlp"),
                ],
                Some("https://t/otlp"),
            ),
            (&[("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318"), ("OTEL_SDK_DISABLED", "true")], None),
            (&[("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318"), ("OTEL_TRACES_EXPORTER", "none")], None),
        ] {
            assert_eq!(filled("", variables).unwrap().otlp_endpoint.as_deref(), want, "{variables:?}");
        }
    }

    #[test]
    fn what_file_or_flag_say_goes_before_it() {
        let file = "[traces]\notlp_endpoint = \"http://f:1\"\nsample = 0.5\nservice_name = \"edge\"\n\
                    resource = { zone = \"a\" }";
        let said = filled(
            file,
            &[
                ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4318"),
                ("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"),
                ("OTEL_SERVICE_NAME", "other"),
                ("OTEL_RESOURCE_ATTRIBUTES", "zone=b, host.name=h%20i,service.name=third"),
                ("OTEL_EXPORTER_OTLP_HEADERS", "api-key=se%3Dcret"),
                ("OTEL_TRACES_SAMPLER", "traceidratio"),
                ("OTEL_TRACES_SAMPLER_ARG", "0.1"),
            ],
        )
        .unwrap();
        assert_eq!(said.otlp_endpoint.as_deref(), Some("http://f:1"));
        assert_eq!((said.sample, said.follow_client), (Some(0.5), Some(false)));
        assert_eq!(said.service_name.as_deref(), Some("edge"));
        let resource: Vec<_> = said.resource.iter().map(|(name, value)| (&**name, &**value)).collect();
        assert_eq!(resource, [("host.name", "h i"), ("zone", "a")]);
        assert_eq!(said.headers, [("api-key".to_owned(), "se=cret".to_owned())]);
        let config = said.validated().unwrap().unwrap();
        assert!(config.headers["api-key"].is_sensitive());
    }

    #[test]
    fn what_cannot_be_used_is_named_and_secrets_are_not() {
        let collector = ("OTEL_EXPORTER_OTLP_ENDPOINT", "http://c:4317");
        for (other, names) in [
            (("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"), "OTEL_EXPORTER_OTLP_PROTOCOL=grpc"),
            (("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://t"), "must end with /v1/traces"),
            (("OTEL_TRACES_SAMPLER", "xray"), "OTEL_TRACES_SAMPLER=xray"),
            (("OTEL_EXPORTER_OTLP_HEADERS", "canary"), "OTEL_EXPORTER_OTLP_HEADERS: expected"),
        ] {
            let error = filled("", &[collector, other]).unwrap_err().to_string();
            assert!(error.contains(names) && !error.contains("canary"), "{error}");
        }
    }
}
