//! Label selectors as the API server reads them: `a=b`, `a!=b`, `a in (b,c)`, `a notin (b)`, `a`, `!a`,
//! joined by commas.

use serde_json::Value;

/// A selector; an empty one selects everything.
#[derive(Debug, Default)]
pub(super) struct Selector(Vec<Rule>);

/// A key, the values it must or must not have (`None`: any), and which of the two.
#[derive(Debug)]
struct Rule {
    key: String,
    values: Option<Vec<String>>,
    wanted: bool,
}

impl Selector {
    /// # Panics
    /// When it is none, as a real server would answer 400.
    pub(super) fn parse(text: &str) -> Self {
        let (mut rules, mut rest) = (Vec::new(), text.trim());
        while !rest.is_empty() {
            let close =
                rest.find(')').filter(|_| rest.find('(') < rest.find(',')).filter(|_| rest.contains('('));
            let end = close.map_or_else(|| rest.find(',').unwrap_or(rest.len()), |close| close + 1);
            rules.push(rule(rest[..end].trim()));
            rest = rest[end..].trim_start_matches([',', ' ']);
        }
        Self(rules)
    }

    /// Whether an object has these labels.
    pub(super) fn selects(&self, object: &Value) -> bool {
        let labels = &object["metadata"]["labels"];
        self.0.iter().all(|rule| {
            let has = labels[&rule.key].as_str();
            let fits = match (&rule.values, has) {
                (None, has) => has.is_some(),
                (Some(values), Some(has)) => values.iter().any(|value| value == has),
                (Some(_), None) => false,
            };
            fits == rule.wanted
        })
    }
}

fn rule(text: &str) -> Rule {
    let of = |key: &str, values: Option<&str>, wanted| {
        let split = |values: &str| values.split(',').map(|value| value.trim().to_owned()).collect();
        Rule { key: key.trim().to_owned(), values: values.map(split), wanted }
    };
    if let Some(list) = text.strip_suffix(')') {
        let (head, values) = list.split_once('(').expect("an opening bracket");
        let (key, word) = head.trim().rsplit_once(' ').expect("in or notin");
        assert!(["in", "notin"].contains(&word), "{text}");
        return of(key, Some(values), word == "in");
    }
    if let Some((key, value)) = text.split_once("!=") {
        return of(key, Some(value), false);
    }
    if let Some((key, value)) = text.split_once('=') {
        return of(key, Some(value.trim_start_matches('=')), true);
    }
    text.strip_prefix('!').map_or_else(|| of(text, None, true), |key| of(key, None, false))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn selectors_select_as_documented() {
        let object = json!({ "metadata": { "labels": { "app": "a", "tier": "x" } } });
        for (text, selected) in [
            ("", true),
            ("app=a", true),
            ("app==b", false),
            ("app!=b,tier", true),
            ("zone!=b", true),
            ("tier in (x, y),app=a", true),
            ("app=a,tier notin (x)", false),
            ("!zone", true),
            ("zone", false),
        ] {
            assert_eq!(Selector::parse(text).selects(&object), selected, "{text}");
        }
    }
}
