//! Writes the lines of requests as tracing's own formats would, in a fraction of the time: there is one for
//! each request, with twenty fields. Other lines, those within a span, and colours are left to tracing.

use std::{
    cell::Cell,
    fmt::{self, Debug, Write as _},
};

use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{
    fmt::{
        FmtContext, FormatEvent, FormatFields,
        format::Writer,
        time::{FormatTime, SystemTime},
    },
    registry::LookupSpan,
};

use crate::clock;

/// The target of these lines.
const REQUESTS: &str = "access";

/// Bytes of most such lines.
const LINE_BYTES: usize = 512;

thread_local! {
    /// A second since 1970, and how its date and time begin.
    static SECOND: Cell<(u64, [u8; 19])> = const { Cell::new((0, [0; 19])) };
}

/// Writes the lines of requests, and leaves the others to another format.
#[derive(Debug)]
pub(super) struct RequestLines<F> {
    /// Whether a line is a JSON object.
    pub(super) json: bool,
    pub(super) others: F,
}

impl<S, N, F> FormatEvent<S, N> for RequestLines<F>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
    F: FormatEvent<S, N>,
{
    fn format_event(
        &self,
        of: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        line: &Event<'_>,
    ) -> fmt::Result {
        let metadata = line.metadata();
        let of_request = metadata.target() == REQUESTS
            && *metadata.level() == Level::INFO
            && metadata.fields().field("message").is_none();
        if !of_request || writer.has_ansi_escapes() || of.lookup_current().is_some() {
            return self.others.format_event(of, writer, line);
        }
        let mut text = String::with_capacity(LINE_BYTES);
        if self.json {
            text.push_str(r#"{"timestamp":""#);
            time(&mut text)?;
            text.push_str(r#"","level":"INFO","fields":{"#);
            line.record(&mut JsonFields { text: &mut text, is_first: true });
            text.push_str(r#"},"target":"access"}"#);
        } else {
            time(&mut text)?;
            text.push_str("  INFO access:");
            line.record(&mut TextFields(&mut text));
        }
        text.push('\n');
        writer.write_str(&text)
    }
}

/// As Rust writes them for people: strings in quotes.
struct TextFields<'t>(&'t mut String);

impl TextFields<'_> {
    fn name(&mut self, field: &Field) {
        self.0.push(' ');
        self.0.push_str(field.name());
        self.0.push('=');
    }
}

impl Visit for TextFields<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.name(field);
        if is_plain(value) {
            quoted(self.0, value);
        } else {
            write(self.0, format_args!("{value:?}"));
        }
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.name(field);
        self.0.push_str(itoa::Buffer::new().format(value));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.name(field);
        write(self.0, format_args!("{value:?}"));
    }
}

/// As members of a JSON object.
struct JsonFields<'t> {
    text: &'t mut String,
    is_first: bool,
}

impl JsonFields<'_> {
    fn name(&mut self, field: &Field) {
        if !std::mem::take(&mut self.is_first) {
            self.text.push(',');
        }
        quoted(self.text, field.name());
        self.text.push(':');
    }

    fn string(&mut self, value: &str) {
        if is_plain(value) {
            quoted(self.text, value);
        } else {
            write(self.text, format_args!("{}", serde_json::Value::from(value)));
        }
    }
}

impl Visit for JsonFields<'_> {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.name(field);
        self.string(value);
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.name(field);
        self.text.push_str(itoa::Buffer::new().format(value));
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.name(field);
        write(self.text, format_args!("{value}"));
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.name(field);
        write(self.text, format_args!("{value}"));
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.name(field);
        write(self.text, format_args!("{}", serde_json::Value::from(value)));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.name(field);
        self.string(&format!("{value:?}"));
    }
}

/// The time, as tracing writes it; all of its digits are worked out once a second.
fn time(text: &mut String) -> fmt::Result {
    let now = || {
        let nanos = clock::unix_nanos();
        (nanos / 1_000_000_000, nanos % 1_000_000_000 / 1_000)
    };
    let (second, micros) = now();
    let (known, digits) = SECOND.get();
    if known == second
        && let Ok(digits) = std::str::from_utf8(&digits)
    {
        text.push_str(digits);
        write(text, format_args!(".{micros:06}Z"));
        return Ok(());
    }
    let from = text.len();
    SystemTime.format_time(&mut Writer::new(text))?;
    // Another second may have begun meanwhile.
    if let (Ok(digits), true) = (text.as_bytes()[from..][..19].try_into(), now().0 == second) {
        SECOND.set((second, digits));
    }
    Ok(())
}

/// Whether it stands in quotes as it is, in Rust's words as in JSON's.
fn is_plain(value: &str) -> bool {
    value.bytes().all(|byte| matches!(byte, b' '..=b'~') && byte != b'"' && byte != b'\\')
}

fn quoted(text: &mut String, value: &str) {
    text.push('"');
    text.push_str(value);
    text.push('"');
}

fn write(text: &mut String, value: fmt::Arguments<'_>) {
    // Memory takes whatever is written to it; a value that cannot be said is left out.
    let _ = text.write_fmt(value);
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use proptest::prelude::*;
    use tracing_subscriber::fmt::format::{self, JsonFields};

    use super::*;

    /// What a log has.
    #[derive(Clone, Default)]
    struct Log(Arc<Mutex<Vec<u8>>>);

    impl std::io::Write for Log {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            self.0.lock().unwrap().extend_from_slice(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }

    /// What is logged by tracing's own format and by ours, without the time.
    fn both(json: bool, logs: impl Fn()) -> [String; 2] {
        [false, true].map(|ours| {
            let log = Log::default();
            let to = log.clone();
            let builder = tracing_subscriber::fmt().with_ansi(false).with_writer(move || to.clone());
            match (json, ours) {
                (false, false) => tracing::subscriber::with_default(builder.finish(), &logs),
                (true, false) => tracing::subscriber::with_default(builder.json().finish(), &logs),
                (false, true) => {
                    let lines = RequestLines { json, others: format() };
                    tracing::subscriber::with_default(builder.event_format(lines).finish(), &logs);
                }
                (true, true) => {
                    let lines = RequestLines { json, others: format().json() };
                    let builder = builder.fmt_fields(JsonFields::new()).event_format(lines);
                    tracing::subscriber::with_default(builder.finish(), &logs);
                }
            }
            let bytes = log.0.lock().unwrap().clone();
            let text = String::from_utf8(bytes).unwrap();
            let without_time = |line: &str| {
                let at = if json { r#"{"timestamp":""#.len() } else { 0 };
                assert_eq!(line.as_bytes()[at + 19], b'.', "{line}");
                format!("{}{}", &line[..at], &line[at + 27..])
            };
            text.lines().map(without_time).collect::<Vec<_>>().join("\n")
        })
    }

    fn format() -> format::Format {
        format::format()
    }

    fn of_request(path: &str, tokens: u64, ms: Option<f64>, miss: Option<&str>) {
        let method = http::Method::POST;
        tracing::info!(
            target: "access",
            path,
            method = %method,
            tokens,
            status = 200_u16,
            attempts = 1_u32,
            translated = (tokens > 3).then_some(true),
            miss,
            drift = Option::<String>::None,
            left = -3_i64,
            ttft_ms = ms,
        );
    }

    #[test]
    fn the_time_is_tracings() {
        let theirs = || {
            let mut text = String::new();
            SystemTime.format_time(&mut Writer::new(&mut text)).unwrap();
            text
        };
        for _ in 0..1_000 {
            let (before, mut ours) = (theirs(), String::from("at "));
            time(&mut ours).unwrap();
            let ours = ours.split_off(3);
            assert!(before <= ours && ours <= theirs(), "{before} {ours}");
            assert_eq!(ours.len(), before.len());
        }
    }

    #[test]
    fn other_lines_and_those_within_a_span_are_tracings_own() {
        for json in [false, true] {
            let [theirs, ours] = both(json, || {
                of_request("/v1/models", 0, None, None);
                tracing::info!(worker = "a", "worker changed state");
                tracing::warn!(target: "access", "not of a request");
                tracing::info!(target: "access", "a message");
                tracing::info!(target: "access", only = 3_u64);
                let _span = tracing::info_span!("within", of = 3).entered();
                of_request("/v1/models", 9, Some(1.5), Some("evicted"));
            });
            assert_eq!((theirs.lines().count(), &theirs), (6, &ours));
        }
    }

    proptest! {
        #[test]
        fn a_request_has_the_line_that_tracing_would_write(
            path in any::<String>(), plain in "[ -~]{0,40}", tokens in any::<u64>(), ms in prop::option::of(any::<f64>()),
            quick in prop::option::of(0.0..1e7_f64),
        ) {
            for json in [false, true] {
                let [theirs, ours] = both(json, || {
                    of_request(&path, tokens, ms, Some(&plain));
                    of_request(&plain, tokens, quick.map(|ms| (ms * 1e3).round() / 1e3), None);
                });
                prop_assert_eq!(theirs, ours);
            }
        }
    }
}
