//! Forms that are as they should be, forms at their bounds and beyond, and any that chance makes.

use proptest::prelude::*;

use super::*;
use crate::limits::{
    GRAMMAR_BYTES_MAX, GRAMMAR_LINES_MAX, GRAMMAR_PROPERTIES_MAX, GRAMMAR_SCHEMA_OBJECTS_MAX,
};

const EOS: u32 = 258;

fn compile(form: &Form) -> Result<Grammar, String> {
    match GrammarCompiler::new(Arc::new(Tokenizer::builtin()), 320, vec![256, EOS]).compile(form.clone()) {
        Ok(grammar) => Ok(grammar),
        Err(NotCompiled::Form(reason)) => Err(reason.to_string()),
        Err(why) => panic!("nobody else compiles: {why:?}"),
    }
}

/// The bytes that may come after `text`, and whether the end may.
fn next(form: &Form, text: &str) -> (String, bool) {
    let mut grammar = compile(form).unwrap();
    for byte in text.bytes() {
        assert_eq!(grammar.accept(u32::from(byte)), Ok(Next::More), "{text}");
    }
    let mut row = vec![0.0; 320];
    grammar.mask(&mut row, &[256, EOS]).unwrap();
    let bytes = (0..128u8).filter(|byte| row[*byte as usize] == 0.0).map(char::from).collect();
    assert_eq!(row[256], row[EOS as usize], "all ends or none");
    let bits = grammar.mask_bits(320, &[256, EOS]).unwrap();
    assert!((0..320).all(|id| (bits[id / 32] >> (id % 32) & 1 == 1) == (row[id] == 0.0)), "{bits:x?}");
    (bytes, row[EOS as usize] == 0.0)
}

#[test]
fn a_schema_says_what_comes_next() {
    let schema = json!({"type": "object", "properties": {"n": {"enum": [7, 12]}}, "required": ["n"],
        "additionalProperties": false});
    let form = Form::Json(schema);
    assert_eq!(next(&form, ""), ("{".to_owned(), false));
    assert_eq!(next(&form, "{\"n\": "), ("17".to_owned(), false));
    assert_eq!(next(&form, "{\"n\": 12"), ("}".to_owned(), false));
    let mut grammar = compile(&form).unwrap();
    let taken: Vec<_> = "{\"n\": 7}".bytes().map(|b| grammar.accept(u32::from(b)).unwrap()).collect();
    assert_eq!(taken.last(), Some(&Next::Nothing), "nothing may follow");
}

#[test]
fn expressions_and_grammars_do_too() {
    assert_eq!(next(&Form::Regex("a(b|cd)?".to_owned()), "a"), ("bc".to_owned(), true));
    assert_eq!(next(&Form::Lark("start: \"x\" | \"yz\"".to_owned()), ""), ("xy".to_owned(), false));
}

#[test]
fn what_cannot_be_compiled_says_why() {
    let refused = |form| compile(&form).unwrap_err();
    assert!(refused(Form::Regex("a(".to_owned())).contains("unclosed"));
    assert!(!refused(Form::Json(json!({"type": "flower"}))).is_empty());
    assert!(!refused(Form::Lark("start: nowhere".to_owned())).is_empty());
    let large = "a".repeat(GRAMMAR_BYTES_MAX + 1);
    assert!(refused(Form::Regex(large.clone())).contains("the most is 65536"));
    assert!(refused(Form::Lark(large.clone())).contains("the most is 262144"));
    assert!(refused(Form::Json(json!({"const": large}))).contains("the most is 1048576"));
}

type Link = fn(Value) -> Value;

/// Named schemas in a chain, each of which says `link` of the next one.
fn chain(length: usize, link: impl Fn(Value) -> Value) -> Form {
    let next = |i: usize| json!({"$ref": format!("#/$defs/d{}", i + 1)});
    let mut defs: serde_json::Map<String, Value> =
        (0..length).map(|i| (format!("d{i}"), link(next(i)))).collect();
    defs.insert(format!("d{length}"), json!({"type": "string"}));
    Form::Json(json!({"$ref": "#/$defs/d0", "$defs": defs}))
}

fn properties(count: usize) -> Value {
    let property = |i: usize| (format!("p{i}"), json!({"type": "string", "pattern": "^(a|b)*c{1,100}$"}));
    json!({"type": "object", "properties": (0..count).map(property).collect::<serde_json::Map<_, _>>()})
}

fn rules(count: usize, rule: impl Fn(usize) -> String) -> Form {
    let rules: String = (0..count).map(|i| rule(i) + "\n").collect();
    Form::Lark(format!("start: r0\n{rules}r{count}: \"a\""))
}

/// The deepest that may be are compiled, or refused with a reason; a stack that overflows would end the
/// test's process.
#[test]
fn the_deepest_forms_within_the_bounds_overflow_no_stack() {
    let objects = GRAMMAR_SCHEMA_OBJECTS_MAX - 10;
    let links: [(usize, Link); 7] = [
        (1, |next| next),
        (2, |next| json!({"items": next})),
        (3, |next| json!({"type": "object", "properties": {"x": next}})),
        (3, |next| json!({"type": "object", "properties": {"x": next}, "required": ["x"]})),
        (2, |next| json!({"type": "object", "additionalProperties": next})),
        (3, |next| json!({"anyOf": [{"type": "null"}, next]})),
        (3, |next| json!({"allOf": [{"type": "object"}, next]})),
    ];
    for (objects_each, link) in links {
        let outcome = compile(&chain(objects / objects_each, link));
        assert!(outcome.is_ok() || !outcome.unwrap_err().contains("the most is"));
    }
    let lines = GRAMMAR_LINES_MAX - 3;
    let rules = [
        rules(lines, |i| format!("r{i}: r{}", i + 1)),
        rules(lines, |i| format!("r{i}: \"x\" r{} | \"y\"", i + 1)),
        rules(lines, |i| format!("r{i}: r{i} \"z\" | r{}", i + 1)),
        Form::Lark(
            (0..lines).fold("start: T0\n".to_owned(), |all, i| all + &format!("T{i}: \"x\" T{}\n", i + 1))
                + &format!("T{lines}: \"a\""),
        ),
    ];
    for form in rules {
        let outcome = compile(&form);
        assert!(outcome.is_ok() || !outcome.unwrap_err().contains("the most is"));
    }
    assert!(compile(&Form::Json(properties(GRAMMAR_PROPERTIES_MAX))).is_ok());
}

#[test]
fn forms_beyond_the_bounds_are_refused_by_name() {
    let lark = |text: &str| Form::Lark(text.to_owned());
    let patterns =
        |count: usize| (0..count).map(|i| json!({"pattern": format!("a{{{i}}}.*")})).collect::<Vec<_>>();
    let embedded = format!("start: %json {}", properties(GRAMMAR_PROPERTIES_MAX + 1));
    let beside = json!({"pattern": "a", "anyOf": [{"pattern": "b", "anyOf": [{"pattern": "c", "anyOf": [{"pattern": "d"}]}]}]});
    for (form, reason) in [
        (Form::Json(properties(GRAMMAR_PROPERTIES_MAX + 1)), "properties in one object"),
        (lark(&embedded), "properties in one object"),
        (
            lark(&format!("start: a\na: \"%json\" %json {}", properties(GRAMMAR_PROPERTIES_MAX + 1))),
            "properties in one object",
        ),
        (chain(GRAMMAR_SCHEMA_OBJECTS_MAX, |next| next), "JSON objects"),
        (rules(GRAMMAR_LINES_MAX, |i| format!("r{i}: r{}", i + 1)), "lines"),
        (Form::Json(json!({"type": "string", "allOf": patterns(4)})), "allOf"),
        (Form::Json(beside), "joined"),
        (Form::Json(json!({"multipleOf": 1_000_003})), "multipleOf"),
        (
            Form::Json(json!({"allOf": [{"type": "integer", "multipleOf": 1009}, {"multipleOf": 1013}]})),
            "multipleOf",
        ),
        (lark("start: T\nT: /a.*/ & /b.*/ & /c/ & /d/ & /e/"), "operators &"),
        (lark("start: T\nT: /\\/\"/ & /\"b.*/ & /c/ & /d/ & \"&\""), "operators &"),
        (lark(&format!("start: T\nT: {}", "~/a/ ".repeat(9))), "operators ~"),
    ] {
        let refused = compile(&form).unwrap_err();
        assert!(refused.contains(reason), "{reason}: {refused}");
    }
    // What is only said, not meant.
    for form in [
        lark("start: \"&&&&&\" /a&b&c&d&e/ \"~~~~~~~~~~~~\""),
        Form::Json(
            json!({"type": "object", "properties": {"a": {"pattern": "a"}, "b": {"pattern": "b"}, "c": {"format": "date"},
            "d": {"format": "uuid"}, "e": {"anyOf": [{"pattern": "e"}, {"type": "null"}]}}}),
        ),
        Form::Json(
            json!({"type": "object", "properties": {"allOf": {"type": "number", "multipleOf": 0.01}}}),
        ),
    ] {
        assert!(compile(&form).is_ok(), "{form:?}: {:?}", compile(&form).err());
    }
}

#[test]
fn a_bound_says_what_is_beyond_it_and_how_much_may_be() {
    let beyond = |schema: Value| bounds::check(&Form::Json(schema)).unwrap_err();
    let one = beyond(json!({"multipleOf": 1_000_003}));
    assert_eq!(one, FormBound::Multiple(1_000_003.0));
    assert_eq!(one.to_string(), "multipleOf is 1000003; the most is 100000");
    let product = beyond(json!({"allOf": [{"multipleOf": 1009}, {"multipleOf": 1013}]}));
    assert_eq!(product, FormBound::Product(1_022_117.0));
    let said = "the product of multipleOf where schemas are joined is 1022117; the most is 100000";
    assert_eq!(product.to_string(), said);
    let (what, most) = ("properties in one object", GRAMMAR_PROPERTIES_MAX);
    let number = most + 1;
    let many = FormError::from(beyond(properties(number)));
    assert_eq!(many, FormError::Bound(FormBound::Number { what, number, most }));
    assert_eq!(many.to_string(), format!("it has {number} {what}; the most is {most}"));
}

fn any_schema() -> impl Strategy<Value = Value> {
    let name = prop::sample::select(vec!["a", "b", "c"]);
    let leaf = prop_oneof![
        Just(json!({"type": "string"})),
        Just(json!(true)),
        Just(json!({"type": "integer", "multipleOf": 7})),
        (1..20usize).prop_map(|n| json!({"type": "string", "pattern": format!("(a|b)*a(a|b){{{n}}}")})),
        name.clone().prop_map(|name| json!({"$ref": format!("#/$defs/{name}")})),
        Just(json!({"enum": ["x", 1, null]})),
    ];
    let schema = leaf.prop_recursive(4, 40, 5, move |inner| {
        let many = prop::collection::vec(inner.clone(), 1..5);
        prop_oneof![
            inner.clone().prop_map(|inner| json!({"type": "array", "items": inner, "minItems": 2})),
            many.clone().prop_map(|many| json!({"anyOf": many})),
            many.clone().prop_map(|many| json!({"allOf": many})),
            many.clone().prop_map(|many| json!({"type": "array", "prefixItems": many})),
            (many, name.clone()).prop_map(|(many, required)| {
                let names = ["a", "b", "c", "d", "e"].map(str::to_owned);
                let fields: serde_json::Map<_, _> = names.into_iter().zip(many).collect();
                json!({"type": "object", "properties": fields, "required": [required]})
            }),
            inner.prop_map(|inner| json!({"type": "object", "additionalProperties": inner})),
        ]
    });
    prop::collection::vec(schema, 4).prop_map(|mut schemas| {
        let mut whole = schemas.pop().unwrap_or(Value::Bool(true));
        if let Value::Object(fields) = &mut whole {
            let [a, b, c] = [0, 1, 2].map(|i| schemas[i].clone());
            fields.insert("$defs".to_owned(), json!({"a": a, "b": b, "c": c}));
        }
        whole
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Whatever refers to whatever: compiled or refused, in its time.
    #[test]
    fn any_schema_ends(schema in any_schema()) {
        if let Err(reason) = compile(&Form::Json(schema)) {
            prop_assert!(!reason.contains("longer than"), "{reason}");
        }
    }

    #[test]
    fn any_text_is_a_grammar_or_none(text in "(start|T|r[0-2]|: |\\|| & |~|\"[a-c]*\"|/[a.*+()|]{0,6}/|%json \\{\\}|\n|\\{1,3\\}|[()?*+]){0,40}") {
        let _ = compile(&Form::Lark(format!("start: T\n{text}")));
        let _ = compile(&Form::Regex(text));
    }
}

#[test]
fn grammars_take_no_more_memory_than_there_is_for_all() {
    let compiler = |limit| GrammarCompiler {
        memory: GrammarMemory::new(limit, limit / 4),
        ..GrammarCompiler::new(Arc::new(Tokenizer::builtin()), 320, vec![256, EOS])
    };
    let form = Form::Regex("[a-z]{3,9}".to_owned());
    let few = compiler(4 << 20);
    let mut live = Vec::new();
    let refused = loop {
        match few.compile(form.clone()) {
            Ok(grammar) => live.push(grammar),
            Err(why) => break why,
        }
    };
    assert_eq!(refused, NotCompiled::Memory);
    assert!((4..12).contains(&live.len()), "{} grammars", live.len());
    // Choices of one request share its grammar.
    let choices = vec![live[0].clone(); 100];
    live.truncate(1);
    drop(choices);
    assert!(few.compile(form).is_ok(), "those that ended gave theirs back");
}

#[test]
fn a_grammar_that_grows_beyond_what_there_is_ends_its_answer() {
    let all = GrammarCompiler {
        memory: GrammarMemory::new(2 << 20, 1 << 20),
        ..GrammarCompiler::new(Arc::new(Tokenizer::builtin()), 320, vec![256, EOS])
    };
    // What came last, 12 letters of it, is a state.
    let mut grammar = all.compile(Form::Regex("[ab]*a[ab]{12}".to_owned())).unwrap();
    let mut row = vec![0.0; 320];
    let mut draws = 1_u32;
    let broken = (0..4000).find_map(|_| {
        draws = draws.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let letter = if draws >> 31 == 0 { b'a' } else { b'b' };
        row.fill(0.0);
        grammar.mask(&mut row, &[256, EOS]).err().or_else(|| grammar.accept(u32::from(letter)).err())
    });
    assert_eq!(broken, Some(Broken::Memory));
}
