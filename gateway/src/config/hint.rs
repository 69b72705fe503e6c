//! What was probably meant by a key that the configuration's file does not know.

use schemars::{Schema, schema_for};
use serde_json::Value;

use super::File;

/// How alike two names must be, of 1 (Jaro-Winkler), for one to be taken for the other.
const ALIKE_MIN: f64 = 0.85;

/// The parser's message; of an unknown name first what was probably meant, before the list of all of them.
pub(super) fn with_hint(message: &str) -> String {
    let Some((unknown, name, list)) = unknown(message) else { return message.to_owned() };
    let known = list.split('`').skip(1).step_by(2);
    let alike = known.map(|known| (strsim::jaro_winkler(name, known), known));
    let best = alike.filter(|(alike, _)| *alike >= ALIKE_MIN).max_by(|a, b| a.0.total_cmp(&b.0));
    let hint = match best {
        Some((_, known)) => format!("did you mean `{known}`?"),
        None => match tables_with(name).as_slice() {
            [] => return message.to_owned(),
            tables => format!("it stands in {}.", tables.join(" and in ")),
        },
    };
    format!("{unknown}: {hint} Else{list}")
}

/// Of "unknown field `x`, expected `a` or `b`": what comes before the comma, the name, and the rest.
fn unknown(message: &str) -> Option<(&str, &str, &str)> {
    let rest =
        message.strip_prefix("unknown field `").or_else(|| message.strip_prefix("unknown variant `"))?;
    let (name, rest) = rest.split_once('`')?;
    let list = rest.strip_prefix(',')?;
    Some((&message[..message.len() - rest.len()], name, list))
}

/// The tables of the file that have this key.
fn tables_with(key: &str) -> Vec<String> {
    let schema = schema_for!(File);
    let Some(tables) = schema.get("properties").and_then(Value::as_object) else { return Vec::new() };
    let has =
        |table: &&String| table_of(&schema, &tables[table.as_str()]).is_some_and(|of| of.get(key).is_some());
    tables.keys().filter(has).map(|table| format!("[{table}]")).collect()
}

/// The keys of a table, where a property is one.
fn table_of<'a>(schema: &'a Schema, property: &Value) -> Option<&'a Value> {
    let name = property.get("$ref")?.as_str()?.strip_prefix("#/$defs/")?;
    schema.get("$defs")?.get(name)?.get("properties")
}

#[cfg(test)]
mod tests {
    use crate::config::File;

    #[test]
    fn a_slip_and_a_key_of_another_table_are_known() {
        for (text, hint) in [
            (
                "polcy = \"prefix\"",
                "unknown field `polcy`: did you mean `policy`? Else expected one of `listen`",
            ),
            ("[routing]\nindex_byte = 1", "did you mean `index_bytes`?"),
            ("index_bytes = 1", "unknown field `index_bytes`: it stands in [routing]. Else"),
            ("[routing]\nmax_in_flight = 1", "it stands in [limits]"),
            ("[traces]\ngenai = \"newest\"", "unknown variant `newest`, expected"),
        ] {
            let error = File::parse(text).unwrap_err().to_string();
            assert!(error.contains(hint), "{error}");
        }
    }

    #[test]
    fn what_is_like_nothing_is_said_as_it_is() {
        let error = File::parse("xyzzy = 1").unwrap_err().to_string();
        assert!(error.contains("unknown field `xyzzy`, expected one of"), "{error}");
    }
}
