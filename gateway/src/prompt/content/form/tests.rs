//! The reader of forms, beside a naive one that cuts a body at its boundary as Python's `email` does.

use proptest::prelude::*;

use super::*;

fn form(kind: &str, body: &[u8]) -> Option<Form> {
    Form::of(Some(kind.as_bytes()), body)
}

fn model(kind: &str, body: &[u8]) -> Option<String> {
    form(kind, body)?.model
}

const KIND: &str = "multipart/form-data; boundary=xX";

#[test]
fn the_model_is_found_wherever_and_however_its_part_is_written() {
    let file = "--xX\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\nContent-Type: audio/wav\r\n\r\n\0\u{1}--xX\r\nname=\"model\"\r\n\r\n--x\r\n";
    let field = "--xX\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nwhisper\r\n";
    let end = "--xX--\r\n";
    for body in [
        format!("{field}{end}"),
        format!("{file}{field}{end}"),
        format!("{field}{file}{end}"),
        format!("preamble that is nobody's\r\n{field}{end}epilogue\r\n{field}"),
        format!("\r\n{field}{end}"),
        // Other headers first, in other cases, unquoted, with blanks.
        "--xX\r\ncontent-type: text/plain; charset=utf-8\r\nX-Other: name=\"no\"\r\nCONTENT-DISPOSITION:form-data;  NAME=model\r\n\r\nwhisper\r\n--xX--".into(),
        "--xX \t\r\nContent-Disposition: form-data ; name = \"model\" ; other=\"a;name=b\"\r\n\r\nwhisper\r\n--xX--".into(),
        // A semicolon and a quote within a text that stands before.
        "--xX\r\nContent-Disposition: form-data; x=\"a\\\"; name=no; \\\\\"; name=\"model\"\r\n\r\nwhisper\r\n--xX--".into(),
        // Lines of one byte.
        format!("{field}{end}").replace("\r\n", "\n"),
        // The last of several counts.
        format!("{}{field}{end}", field.replace("whisper", "other")),
    ] {
        assert_eq!(model(KIND, body.as_bytes()).as_deref(), Some("whisper"), "{body:?}");
    }
}

#[test]
fn the_boundary_is_read_as_it_is_written() {
    let body = |boundary: &str| {
        format!("--{boundary}\r\ncontent-disposition: form-data; name=model\r\n\r\nm\r\n--{boundary}--\r\n")
    };
    for (kind, boundary) in [
        ("multipart/form-data; boundary=----WebKitFormBoundary7MA4", "----WebKitFormBoundary7MA4"),
        ("multipart/form-data; boundary=\"a b;c=d\"", "a b;c=d"),
        ("Multipart/Form-Data;charset=utf-8;BOUNDARY=x ; y=z", "x"),
        ("multipart/mixed; a=\"; boundary=no\"; boundary='q'", "'q'"),
    ] {
        assert_eq!(model(kind, body(boundary).as_bytes()).as_deref(), Some("m"), "{kind}");
    }
    assert_eq!(form("multipart/form-data", body("x").as_bytes()), None);
    assert_eq!(form("multipart/form-data; boundary=", body("").as_bytes()), None);
}

#[test]
fn what_is_no_field_of_that_name_is_not_taken_for_it() {
    for body in [
        "--xX\r\ncontent-disposition: form-data; name=\"model\"; filename=\"m.txt\"\r\n\r\nm\r\n--xX--",
        "--xX\r\ncontent-disposition: form-data; name=\"models\"\r\n\r\nm\r\n--xX--",
        "--xXX\r\ncontent-disposition: form-data; name=\"model\"\r\n\r\nm\r\n--xXX--",
        "a--xX\r\ncontent-disposition: form-data; name=\"model\"\r\n\r\nm\r\n--xX--",
        "--xX\r\n\r\ncontent-disposition: form-data; name=\"model\"\r\n\r\nm\r\n--xX--",
        "--xX\r\nx-content-disposition: form-data; name=\"model\"\r\n\r\nm\r\n--xX--",
        // Cut within the value: what it would have been is not known.
        "--xX\r\ncontent-disposition: form-data; name=\"model\"\r\n\r\nm",
        "--xX--",
        "--xX\r\n--xX\r\n",
        "",
    ] {
        assert_eq!(form(KIND, body.as_bytes()), Some(Form::default()), "{body:?}");
    }
}

#[test]
fn a_form_s_stream_is_what_pydantic_takes_for_true() {
    let stream = |value: &str| {
        let body = format!("--xX\r\ncontent-disposition: form-data; name=stream\r\n\r\n{value}\r\n--xX--");
        form(KIND, body.as_bytes()).unwrap().stream
    };
    assert!(["true", "True", "1", "on"].iter().all(|value| stream(value)));
    assert!(!["false", "0", "", "truer"].iter().any(|value| stream(value)));
}

#[test]
fn urlencoded_fields_are_unescaped_and_json_that_is_called_so_is_json() {
    const KIND: &str = "application/x-www-form-urlencoded";
    assert_eq!(model(KIND, b"a=b&model=org%2Fm+x&stream=true").as_deref(), Some("org/m x"));
    assert_eq!(model(KIND, b"model=a&model=b").as_deref(), Some("b"));
    assert_eq!(form(KIND, b" {\"model\":\"m\"}"), None);
    assert_eq!(form("application/json", b"model=m"), None);
}

/// What stands between lines of the boundary, part by part: the model's, of well-made bodies.
fn naive(body: &[u8], boundary: &str) -> Option<Vec<u8>> {
    let text: Vec<char> = body.iter().map(|byte| char::from(*byte)).collect();
    let text: String = format!("\r\n{}", text.into_iter().collect::<String>());
    let mut found = None;
    for part in text.split(&format!("\r\n--{boundary}")).skip(1) {
        if part.starts_with("--") {
            break;
        }
        let Some((head, value)) = part.strip_prefix("\r\n")?.split_once("\r\n\r\n") else { continue };
        if head.contains("name=\"model\"") && !head.contains("filename") {
            found = Some(value.chars().map(|char| char as u8).collect());
        }
    }
    found
}

fn part() -> impl Strategy<Value = Vec<u8>> {
    let name = prop::sample::select(vec!["model", "file", "prompt", "stream"]);
    let filename = prop::sample::select(vec!["", "; filename=\"a\""]);
    let first = prop::sample::select(vec!["", "Content-Type: text/plain\r\n"]);
    // Much that looks like a boundary.
    let piece = prop::sample::select(vec![
        "a",
        "\r\n",
        "--",
        "xX",
        "\n",
        "\r",
        "-",
        "name=\"model\"",
        "\r\n\r\n",
        "é",
    ]);
    let value = prop::collection::vec(piece, 0..12).prop_map(|pieces| pieces.concat());
    (name, filename, first, value).prop_map(|(name, filename, first, value)| {
        format!("{first}Content-Disposition: form-data; name=\"{name}\"{filename}\r\n\r\n{value}")
            .into_bytes()
    })
}

proptest! {
    #[test]
    fn well_made_forms_are_read_as_a_naive_reader_reads_them(parts in prop::collection::vec(part(), 0..5), preamble: bool) {
        let boundary = "xX--boundary";
        let mut body = if preamble { b"preamble\r\n".to_vec() } else { Vec::new() };
        for part in &parts {
            prop_assume!(!part.windows(boundary.len()).any(|window| window == boundary.as_bytes()));
            body.extend([b"--", boundary.as_bytes(), b"\r\n", part, b"\r\n"].concat());
        }
        body.extend(format!("--{boundary}--\r\n").bytes());
        let read = Multipart::new(&body, boundary.as_bytes()).filter(|(name, _)| &**name == b"model").last();
        prop_assert_eq!(read.map(|(_, value)| value.to_vec()), naive(&body, boundary));
    }

    #[test]
    fn no_bytes_make_it_panic_or_go_on_for_ever(pieces in prop::collection::vec(prop::sample::select(vec![
        "--xX", "\r\n", "\n", "--", "content-disposition:", ";", "name=", "model", "\"", "\\", "=", " ", "x", "\0",
    ]), 0..40)) {
        let body = pieces.concat();
        prop_assert!(Multipart::new(body.as_bytes(), b"xX").count() <= body.len());
        drop(form(&format!("multipart/x{}", body.replace(['\r', '\n', '\0'], "")), body.as_bytes()));
    }
}
