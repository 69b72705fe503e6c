//! Bounds and errors. What templates render is compared with transformers in `tests/templates.rs`.

use proptest::prelude::*;

use super::{Error, Template};

fn render(source: &str) -> Result<String, Error> {
    Template::new(source)?.render(&[], [], 0, 1 << 20)
}

#[track_caller]
fn refuses(source: &str, why: &str) {
    let error = render(source).unwrap_err();
    assert!(error.message.contains(why), "{error}");
}

/// The stack of a thread that serves requests.
fn on_a_small_stack(f: impl FnOnce() + Send + 'static) {
    std::thread::Builder::new().stack_size(2 << 20).spawn(f).unwrap().join().unwrap();
}

#[test]
fn nesting_is_bounded_before_the_stack_ends() {
    on_a_small_stack(|| {
        refuses(&format!("{{{{ {}1{} }}}}", "(".repeat(5000), ")".repeat(5000)), "nests too deeply");
        refuses(&format!("{{{{ {}1 }}}}", "not ".repeat(5000)), "nests too deeply");
        refuses(&format!("{{{{ {}1 }}}}", "-".repeat(5000)), "nests too deeply");
        refuses(&"{% if 1 %}".repeat(5000), "nests too deeply");
        refuses("{% macro f() %}{{ [[[[f()]]]] }}{% endmacro %}{{ f() }}", "recurses too deeply");
        refuses("{% for x in [[[]]] recursive %}{{ loop([[]]) }}{% endfor %}", "recurses too deeply");
        let deepest = format!("{{{{ {}1{} }}}}", "[".repeat(100), "]".repeat(100));
        assert_eq!(render(&deepest).unwrap().len(), 201);
    });
}

#[test]
fn work_and_memory_are_bounded() {
    refuses("{{ 'x' * 1000000000000 }}", "too long");
    refuses("{{ [1] * 1000000000000 }}", "too long");
    refuses("{{ range(100001) }}", "100000");
    refuses("{{ '%999999999d' % 1 }}", "width");
    refuses("{{ 10 ** 100 }}", "too large");
    refuses("{{ [1] | batch(1000000000000, 0) | list }}", "batch");
    refuses("{% set s = 'x' * 1000000 %}{{ s.replace('', s) }}", "too long a text");
    let doubling =
        "{% set ns = namespace(s='x') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}";
    refuses(doubling, "too long a text");
    let adding =
        "{% set ns = namespace(s='x') %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}";
    refuses(adding, "too long a text");
    refuses("{% set s = 'x\\n' * 500000 %}{{ (s + s + s).splitlines() | length }}", "too long a text");
}

#[test]
fn going_through_a_long_text_is_as_much_work_as_it_is_long() {
    let steps = |what: &str| {
        let source = format!(
            "{{% set s = 'x' * 1000000 %}}{{% set l = range(1000) | list %}}{{% if {what} %}}{{% endif %}}"
        );
        let mut interpreter = super::eval::Interpreter::new(Vec::new(), 0, 2 << 20);
        interpreter.render(&Template::new(&source).unwrap().body).unwrap();
        interpreter.steps()
    };
    let nothing = steps("1");
    for what in [
        "'y' in s",
        "s[5:]",
        "s.strip()",
        "s | trim",
        "s.find('y')",
        "s | upper",
        "s ~ 'z'",
        "s + 'z'",
        "s.split('y')",
    ] {
        assert!(steps(what) - nothing > 1_000_000 / 100, "{what}: {}", steps(what) - nothing);
    }
    // What looks at its beginning or end alone is not.
    for what in ["s.startswith('y')", "l | last", "l | length", "l | first"] {
        assert!(steps(what) - nothing < 20, "{what}: {}", steps(what) - nothing);
    }
    assert!(steps("l[1:]") - nothing > 100);
}

#[test]
fn an_error_names_its_line_also_inside_a_macro() {
    let error = render("a\n{% macro f() %}\n{{ 1 / 0 }}\n{% endmacro %}\n{{ f() }}").unwrap_err();
    assert_eq!(error.to_string(), "line 3: division by zero");
}

#[test]
fn a_macro_that_outlives_its_block_is_an_error() {
    let source = "{% set ns = namespace() %}{% for i in [1] %}{% macro f() %}x{% endmacro %}\
        {% set ns.f = f %}{% endfor %}{{ ns.f() }}";
    refuses(source, "outside of its block");
}

proptest! {
    /// Whatever a template says, compiling and rendering it ends, with a text or an error.
    #[test]
    fn nothing_panics(
        parts in prop::collection::vec(
            prop_oneof![
                prop::sample::select(vec![
                    "{%", "%}", "{{", "}}", "{#", "#}", "-", "+", "for", " x ", "in", " if ", "else", "endfor", "endif",
                    "set", "=", "(", ")", "[", "]", "{", "}", ":", ",", ".", "|", "is", "not ", "and", "~", "%", "*",
                    "'a'", "\"é", "1", "0x", "1e", "raw", "endraw", "macro", "loop", "length", "join", "\n", " ",
                    "range(3)", "'%s'", "'{}'.format", "namespace()", "tojson", "slice", "-1", "split", "\\",
                ]).prop_map(str::to_owned),
                ".{0,3}",
            ],
            0..24,
        ),
    ) {
        let _ = render(&parts.concat());
        let _ = render(&format!("{{{{ {} }}}}", parts.concat()));
    }

    #[test]
    fn slices_are_pythons(
        len in 0usize..6, start in prop::option::of(-8i128..8), stop in prop::option::of(-8i128..8),
        step in prop::option::of((-3i128..4).prop_filter("not 0", |s| *s != 0)),
    ) {
        let shown = |n: Option<i128>| n.map_or_else(String::new, |n| n.to_string());
        let items: Vec<usize> = (0..len).collect();
        let source = format!("{{{{ {items:?}[{}:{}:{}] }}}}", shown(start), shown(stop), shown(step));
        // Python's definition: the indices from start to stop by step that exist.
        let (n, by) = (len as i128, step.unwrap_or(1));
        let clamp = |at: i128| if at < 0 { (at + n).max(if by > 0 { 0 } else { -1 }) } else { at };
        let mut at = start.map_or(if by > 0 { 0 } else { n - 1 }, clamp);
        at = if by < 0 { at.min(n - 1) } else { at };
        let end = stop.map_or(if by > 0 { n } else { -1 }, clamp);
        let mut want = Vec::new();
        while (by > 0 && at < end.min(n)) || (by < 0 && at > end) {
            want.push(at);
            at += by;
        }
        prop_assert_eq!(render(&source).unwrap(), format!("{want:?}"));
    }
}
