//! What is public has a name of its own in its crate, and docs that say more than the name. Parameters have
//! names, too: a tuple of three is a struct that nobody has named. Errors have types, but for those of who
//! reads a text: what is wrong with it is said in words.
#![allow(clippy::expect_used, reason = "helpers of tests fail the test by panicking")]

use std::collections::BTreeMap;

use keyway_tests::bins::workspace_root;
use keyway_tests::sources;
use syn::visit::{self, Visit};

/// Words of a doc that says next to nothing.
const SHORT_DOC_WORDS: usize = 3;
/// How many docs of the repository may be that short.
const SHORT_DOCS_MAX: usize = 200;
/// Parts of a tuple that is a parameter.
const TUPLE_PARTS_MAX: usize = 2;

/// The crates, by the folders of their sources.
const CRATES: [&str; 12] = [
    "gateway/src",
    "gateway/apis/src",
    "gateway/clients/src",
    "gateway/core/src",
    "gateway/lines/src",
    "gateway/text/src",
    "gateway/wire/src",
    "gateway/zmq/src",
    "kernels/src",
    "loadtest/src",
    "worker/src",
    "tests/src",
];

/// Those whose errors have types.
const TYPED: [&str; 11] = [
    "gateway/src",
    "gateway/apis/src",
    "gateway/clients/src",
    "gateway/core/src",
    "gateway/lines/src",
    "gateway/text/src",
    "gateway/wire/src",
    "gateway/zmq/src",
    "kernels/src",
    "loadtest/src",
    "worker/src",
];

/// What is found in one file, tests left out.
#[derive(Default)]
struct Found {
    public_types: Vec<String>,
    short_docs: Vec<String>,
    tuples: Vec<String>,
    /// Functions whose errors are texts, though they read none.
    untyped: Vec<String>,
}

/// An item's doc comment, as one line.
fn doc(attributes: &[syn::Attribute]) -> Option<String> {
    let line = |attribute: &syn::Attribute| {
        let syn::Meta::NameValue(pair) = &attribute.meta else { return None };
        let syn::Expr::Lit(literal) = &pair.value else { return None };
        let syn::Lit::Str(text) = &literal.lit else { return None };
        pair.path.is_ident("doc").then(|| text.value().trim().to_owned())
    };
    let lines: Vec<String> = attributes.iter().filter_map(line).collect();
    (!lines.is_empty()).then(|| lines.join(" "))
}

/// The attributes of an item that may have a doc.
fn attributes_of(item: &syn::Item) -> &[syn::Attribute] {
    match item {
        syn::Item::Const(item) => &item.attrs,
        syn::Item::Enum(item) => &item.attrs,
        syn::Item::Fn(item) => &item.attrs,
        syn::Item::Impl(item) => &item.attrs,
        syn::Item::Mod(item) => &item.attrs,
        syn::Item::Static(item) => &item.attrs,
        syn::Item::Struct(item) => &item.attrs,
        syn::Item::Trait(item) => &item.attrs,
        syn::Item::Type(item) => &item.attrs,
        _ => &[],
    }
}

impl Found {
    fn take_doc(&mut self, attributes: &[syn::Attribute]) {
        let short = |doc: &String| doc.split_whitespace().count() <= SHORT_DOC_WORDS;
        self.short_docs.extend(doc(attributes).filter(short));
    }

    fn take_type(&mut self, visibility: &syn::Visibility, name: &syn::Ident) {
        if matches!(visibility, syn::Visibility::Public(_)) {
            self.public_types.push(name.to_string());
        }
    }
}

impl<'a> Visit<'a> for Found {
    fn visit_item(&mut self, item: &'a syn::Item) {
        let attributes = attributes_of(item);
        if !sources::is_of_tests(attributes) {
            self.take_doc(attributes);
            visit::visit_item(self, item);
        }
    }

    fn visit_field(&mut self, field: &'a syn::Field) {
        self.take_doc(&field.attrs);
        visit::visit_field(self, field);
    }

    fn visit_variant(&mut self, variant: &'a syn::Variant) {
        self.take_doc(&variant.attrs);
        visit::visit_variant(self, variant);
    }

    fn visit_impl_item(&mut self, item: &'a syn::ImplItem) {
        match item {
            syn::ImplItem::Const(item) => self.take_doc(&item.attrs),
            syn::ImplItem::Fn(item) => self.take_doc(&item.attrs),
            syn::ImplItem::Type(item) => self.take_doc(&item.attrs),
            _ => {}
        }
        visit::visit_impl_item(self, item);
    }

    fn visit_trait_item(&mut self, item: &'a syn::TraitItem) {
        match item {
            syn::TraitItem::Const(item) => self.take_doc(&item.attrs),
            syn::TraitItem::Fn(item) => self.take_doc(&item.attrs),
            syn::TraitItem::Type(item) => self.take_doc(&item.attrs),
            _ => {}
        }
        visit::visit_trait_item(self, item);
    }

    fn visit_item_struct(&mut self, item: &'a syn::ItemStruct) {
        self.take_type(&item.vis, &item.ident);
        visit::visit_item_struct(self, item);
    }

    fn visit_item_enum(&mut self, item: &'a syn::ItemEnum) {
        self.take_type(&item.vis, &item.ident);
        visit::visit_item_enum(self, item);
    }

    fn visit_item_trait(&mut self, item: &'a syn::ItemTrait) {
        self.take_type(&item.vis, &item.ident);
        visit::visit_item_trait(self, item);
    }

    fn visit_item_type(&mut self, item: &'a syn::ItemType) {
        self.take_type(&item.vis, &item.ident);
        visit::visit_item_type(self, item);
    }

    fn visit_signature(&mut self, signature: &'a syn::Signature) {
        let reads_text =
            |input: &syn::FnArg| matches!(input, syn::FnArg::Typed(typed) if has_text(&typed.ty));
        if let syn::ReturnType::Type(_, output) = &signature.output
            && is_untyped(output)
            && !signature.inputs.iter().any(reads_text)
        {
            self.untyped.push(signature.ident.to_string());
        }
        for input in &signature.inputs {
            if let syn::FnArg::Typed(typed) = input
                && let syn::Type::Tuple(tuple) = &*typed.ty
                && tuple.elems.len() > TUPLE_PARTS_MAX
            {
                self.tuples.push(signature.ident.to_string());
            }
        }
        visit::visit_signature(self, signature);
    }
}

/// Whether a parameter is a text, or may be one.
fn has_text(of: &syn::Type) -> bool {
    struct Seen(bool);
    impl Visit<'_> for Seen {
        fn visit_path(&mut self, path: &syn::Path) {
            self.0 |= path.is_ident("str");
            visit::visit_path(self, path);
        }
    }
    let mut seen = Seen(false);
    seen.visit_type(of);
    seen.0
}

/// Whether it is a result whose error is a text.
fn is_untyped(of: &syn::Type) -> bool {
    let syn::Type::Path(path) = of else { return false };
    let Some(last) = path.path.segments.last().filter(|last| last.ident == "Result") else { return false };
    let syn::PathArguments::AngleBracketed(arguments) = &last.arguments else { return false };
    let error = arguments.args.iter().nth(1);
    matches!(error, Some(syn::GenericArgument::Type(syn::Type::Path(error))) if error.path.is_ident("String"))
}

/// What is found in each file of a crate.
fn each_of(dir: &str) -> impl Iterator<Item = (String, Found)> {
    let sources = sources::below(&workspace_root().join(dir)).into_iter();
    let files = sources.filter(|(file, _)| !sources::is_test(file));
    files.map(move |(file, text)| (format!("{dir}/{file}"), found(&text)))
}

fn found(text: &str) -> Found {
    let mut found = Found::default();
    found.visit_file(&syn::parse_file(text).expect("Rust"));
    found
}

#[test]
fn no_two_public_types_of_a_crate_share_a_name() {
    for dir in CRATES {
        let mut places: BTreeMap<String, Vec<String>> = BTreeMap::new();
        for (file, found) in each_of(dir) {
            for name in found.public_types {
                places.entry(name).or_default().push(file.clone());
            }
        }
        places.retain(|_, places| places.len() > 1);
        assert!(places.is_empty(), "{dir}: {places:#?}");
    }
}

#[test]
fn no_parameter_is_a_tuple_of_three() {
    let mut tuples = Vec::new();
    for dir in CRATES {
        for (file, found) in each_of(dir) {
            tuples.extend(found.tuples.iter().map(|name| format!("{file}: {name}")));
        }
    }
    assert!(tuples.is_empty(), "{tuples:#?}");
}

#[test]
fn errors_have_types_unless_a_text_is_read() {
    let mut untyped = Vec::new();
    for dir in TYPED {
        for (file, found) in each_of(dir) {
            untyped.extend(found.untyped.iter().map(|name| format!("{file}: {name}")));
        }
    }
    assert!(untyped.is_empty(), "{untyped:#?}");
}

#[test]
fn docs_say_more_than_names() {
    let (mut count, mut most) = (0, BTreeMap::new());
    for dir in CRATES {
        for (file, found) in each_of(dir).filter(|(_, found)| !found.short_docs.is_empty()) {
            count += found.short_docs.len();
            most.insert((found.short_docs.len(), file), found.short_docs);
        }
    }
    let worst: Vec<_> = most.iter().rev().take(10).collect();
    assert!(
        count < SHORT_DOCS_MAX,
        "{count} docs have {SHORT_DOC_WORDS} words or fewer; say unit, range or source: {worst:#?}"
    );
}

#[test]
fn what_is_counted_is_seen() {
    let text = "/// A type.\npub struct A { /// Its name.\npub b: u8 }\npub enum B { /// Seen wherever it stands.\nC }\n\
        pub(crate) struct A2;\n#[cfg(test)] mod tests { /// X.\npub struct A; }\n\
        impl A { fn f((a, b, c): (u8, u8, u8), (d, e): (u8, u8)) {} }";
    let found = found(text);
    assert_eq!(found.public_types, ["A", "B"]);
    assert_eq!(found.short_docs, ["A type.", "Its name."]);
    assert_eq!(found.tuples, ["f"]);
    let text = "fn a() -> Result<u8, String> {}\nfn b(text: &str) -> Result<u8, String> {}\n\
        impl A { fn c(&self, at: usize) -> std::result::Result<Vec<u8>, String> {} }\n\
        fn d() -> Result<String, Error> {}\nfn e(text: Option<&str>) -> Result<(), String> {}";
    assert_eq!(self::found(text).untyped, ["a", "c"]);
}
