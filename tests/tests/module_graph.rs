//! The rooms of the gateway, the worker and the load tester, and the direction of their imports, asserted. A
//! room is a module at the top of a crate with all that is below it; it imports from rooms further down, and
//! never from one further up. So there is no circle between rooms, and a room can be read without those above
//! it.
#![allow(clippy::expect_used, reason = "helpers of tests fail the test by panicking")]

use keyway_tests::bins::workspace_root;
use keyway_tests::sources::{self, is_of_tests};
use syn::visit::{self, Visit};

/// A crate whose rooms have an order.
struct House {
    /// Its sources, relative to the repository's root.
    src: &'static str,
    /// Its rooms from top to bottom.
    rooms: &'static [&'static str],
}

const HOUSES: [House; 3] = [GATEWAY, WORKER, LOADTEST];

const GATEWAY: House = House {
    src: "gateway/src",
    rooms: &[
        "process",
        "ops",
        "edge",
        "watch",
        "proxy",
        "scale",
        "routing",
        "stored_state",
        "demand",
        "telemetry",
        "access",
        "ledger",
        "usage",
        "translation",
        "fleet",
        "prompt",
        "upstream",
        "store",
        "config",
        "net",
        "metrics",
        "machine",
        // Tables and seams, a file or a few each.
        "headers",
        "path",
        "error",
        "api",
        "sse",
        "json",
        "shortage",
        "limits",
        "leaving",
        "clock",
    ],
};

const WORKER: House = House {
    src: "worker/src",
    rooms: &[
        "cli",
        "fuzz",
        "worker",
        "server",
        "api",
        "answer",
        "kv_transfer",
        "parallel",
        "model",
        "engine",
        "request_memory",
        "metrics",
        "log",
        "memory",
        "device",
        "limits",
    ],
};

const LOADTEST: House = House {
    src: "loadtest/src",
    rooms: &[
        "commands",
        "settled",
        "sweep",
        "search",
        "run",
        "calibrate",
        "check",
        "trace_commands",
        "simulate",
        "merge",
        "export",
        "compare",
        "draw",
        "report",
        "config",
        "load",
        "output",
        "scrape",
        "args",
        "mock",
        "stdout",
        "error",
        "progress",
        "tally",
        "slo",
        "stats",
        "client",
        "sums",
        "oracle",
        "schedule",
        "workload",
        "trace",
        "random",
        "engine_model",
        "units",
        "limits",
    ],
};

/// A source file: where it is below `src`, and its text.
type Source = (String, String);

/// One import: the room it is in, the file, and the path that is named.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Import {
    file: String,
    from: String,
    to: String,
    path: String,
}

/// Finds the paths of a file that begin at the crate's root.
struct Paths {
    /// The file's module, as names from the root.
    module: Vec<String>,
    found: Vec<Vec<String>>,
}

impl Paths {
    /// Takes `crate::a::b`, and `super::b` where that leads to the root.
    fn take(&mut self, path: &[String]) {
        let rest: Vec<String> = match path.first().map(String::as_str) {
            Some("crate") => path[1..].to_vec(),
            Some("super") => {
                let ups = path.iter().take_while(|name| *name == "super").count();
                let Some(left) = self.module.len().checked_sub(ups) else { return };
                self.module[..left].iter().chain(&path[ups..]).cloned().collect()
            }
            _ => return,
        };
        if !rest.is_empty() {
            self.found.push(rest);
        }
    }

    fn take_tree(&mut self, tree: &syn::UseTree, before: &[String]) {
        let with = |name: String| before.iter().cloned().chain([name]).collect::<Vec<_>>();
        match tree {
            syn::UseTree::Path(path) => self.take_tree(&path.tree, &with(path.ident.to_string())),
            syn::UseTree::Name(name) if name.ident == "self" => self.take(before),
            syn::UseTree::Name(name) => self.take(&with(name.ident.to_string())),
            syn::UseTree::Rename(name) => self.take(&with(name.ident.to_string())),
            syn::UseTree::Glob(_) => self.take(before),
            syn::UseTree::Group(group) => group.items.iter().for_each(|item| self.take_tree(item, before)),
        }
    }
}

impl<'a> Visit<'a> for Paths {
    fn visit_item_mod(&mut self, item: &'a syn::ItemMod) {
        if !is_of_tests(&item.attrs) {
            self.module.push(item.ident.to_string());
            visit::visit_item_mod(self, item);
            self.module.pop();
        }
    }

    fn visit_item_impl(&mut self, item: &'a syn::ItemImpl) {
        if !is_of_tests(&item.attrs) {
            visit::visit_item_impl(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'a syn::ItemUse) {
        if !is_of_tests(&item.attrs) {
            self.take_tree(&item.tree, &[]);
        }
    }

    fn visit_path(&mut self, path: &'a syn::Path) {
        let names: Vec<String> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
        self.take(&names);
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, item: &'a syn::Macro) {
        // What a macro makes of its words is not known; a path among them stands there as one.
        let words = item.tokens.to_string();
        for path in words.split("crate :: ").skip(1) {
            let name = path.split(|letter: char| !(letter.is_alphanumeric() || letter == '_')).next();
            self.take(&["crate".to_owned(), name.unwrap_or_default().to_owned()]);
        }
        visit::visit_macro(self, item);
    }
}

/// The module of a file below `src`, as names from the root.
fn module_of(file: &str) -> Vec<String> {
    file.trim_end_matches(".rs").split('/').map(str::to_owned).collect()
}

/// Whether a file is the crate's root, or compiled for tests alone.
fn is_left_out(file: &str) -> bool {
    ["lib.rs", "main.rs"].contains(&file) || sources::is_test(file)
}

/// Every import from one room to another, tests left out.
fn imports(sources: &[Source]) -> Vec<Import> {
    let mut found = Vec::new();
    for (file, text) in sources.iter().filter(|(file, _)| !is_left_out(file)) {
        let parsed = syn::parse_file(text).map_err(|error| format!("{file}: {error}")).expect("Rust");
        let mut paths = Paths { module: module_of(file), found: Vec::new() };
        paths.visit_file(&parsed);
        let from = paths.module[0].clone();
        let others = paths.found.into_iter().filter(|path| path[0] != from);
        found.extend(others.map(|path| Import {
            file: file.clone(),
            from: from.clone(),
            to: path[0].clone(),
            path: path.join("::"),
        }));
    }
    found.sort();
    found.dedup();
    found
}

/// What breaks the order, each as a line.
fn faults(house: &House, sources: &[Source]) -> Vec<String> {
    let floor = |room: &str| house.rooms.iter().position(|known| *known == room);
    let left = sources.iter().filter(|(file, _)| !is_left_out(file));
    let mut faults: Vec<String> = left
        .filter(|(file, _)| floor(&module_of(file)[0]).is_none())
        .map(|(file, _)| format!("{}/{file}: in no room of {}", house.src, file!()))
        .collect();
    for Import { file, from, to, path } in imports(sources) {
        // What the root exports again of other crates is in no room.
        if let (Some(below), Some(above)) = (floor(&from), floor(&to))
            && above < below
        {
            let src = house.src;
            faults.push(format!(
                "{src}/{file}: room `{from}` imports {path} of room `{to}`, which is above it"
            ));
        }
    }
    faults
}

fn sources_of(house: &House) -> Vec<Source> {
    sources::below(&workspace_root().join(house.src))
}

#[test]
fn rooms_import_downwards_alone() {
    for house in &HOUSES {
        let faults = faults(house, &sources_of(house));
        assert!(faults.is_empty(), "\n{}", faults.join("\n"));
    }
}

#[test]
fn every_room_is_there_once() {
    for house in &HOUSES {
        let files: Vec<String> = sources_of(house).into_iter().map(|(file, _)| file).collect();
        for (i, room) in house.rooms.iter().enumerate() {
            assert!(files.contains(&format!("{room}.rs")), "{}/{room}.rs", house.src);
            assert!(!house.rooms[..i].contains(room), "{room} twice");
        }
    }
}

#[test]
fn an_import_upwards_is_found_however_it_is_written() {
    let house = &GATEWAY;
    for (file, text) in [
        ("routing/ticket.rs", "use crate::{clock, proxy::relay::{self}};"),
        ("routing.rs", "fn f() { crate::proxy::relay::begin() }"),
        ("routing/ticket.rs", "use super::super::proxy::relay;"),
        ("routing/a/b.rs", "mod c { fn f(x: &super::super::super::super::proxy::Relay) {} }"),
        ("routing.rs", "fn f() -> String { format!(\"{}\", crate::proxy::NAME) }"),
        ("routing.rs", "impl crate::proxy::Lines for X {}"),
        ("routing.rs", "/// Doc.\n#[derive(Debug)]\nstruct A(Box<dyn Fn(crate::proxy::B)>);"),
    ] {
        let found = faults(house, &[(file.to_owned(), text.to_owned())]);
        assert_eq!(found.len(), 1, "{text}: {found:?}");
        let said = &found[0];
        assert!(said.contains("`routing`") && said.contains("`proxy`") && said.contains(file), "{said}");
    }
    for (file, text) in [
        ("proxy.rs", "use crate::{routing, proxy::relay, client};"),
        ("routing.rs", "#[cfg(test)] mod tests { use crate::proxy; }"),
        ("routing/tests.rs", "use crate::proxy;"),
        ("routing.rs", "//! As [`crate::proxy`] does."),
    ] {
        assert_eq!(faults(house, &[(file.to_owned(), text.to_owned())]), Vec::<String>::new(), "{text}");
    }
    let nowhere = faults(house, &[("attic.rs".to_owned(), String::new())]);
    assert!(nowhere.len() == 1 && nowhere[0].contains("attic.rs"), "{nowhere:?}");
}
