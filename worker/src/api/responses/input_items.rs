//! What was said before an answer that is kept, a page at a time.

use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::store::Kept;
use crate::api::error::ApiError;

/// Items on a page, unless the client says how many, and at most.
const LIMIT_DEFAULT: usize = 20;
const LIMIT_MAX: usize = 100;

/// Which page a client asks for.
#[derive(Debug)]
struct Page {
    limit: usize,
    after: Option<String>,
    latest_first: bool,
}

/// A page of the items before the answer of this id.
pub(super) fn page(id: &str, kept: &Kept, query: Option<&str>) -> Result<Value, ApiError> {
    let Page { limit, after, latest_first } = wanted(query.unwrap_or_default())?;
    let input = [b"[", &kept.items[..kept.input_bytes], b"]"].concat();
    let items: Vec<&RawValue> = serde_json::from_slice(&input).map_err(ApiError::internal)?;
    let mut places: Vec<usize> = (0..items.len()).collect();
    if latest_first {
        places.reverse();
    }
    if let Some(after) = after {
        let at = places.iter().position(|nth| id_of(id, *nth, items[*nth]) == after);
        let unknown = || ApiError::invalid_value("after", "'after' is the id of no item. Ask without it.");
        places.drain(..=at.ok_or_else(unknown)?);
    }
    let has_more = places.len() > limit;
    places.truncate(limit);
    let data: Vec<Value> = places.iter().map(|nth| told(id, *nth, items[*nth])).collect();
    let id_at = |item: Option<&Value>| item.map_or(Value::Null, |item| item["id"].clone());
    let (first, last) = (id_at(data.first()), id_at(data.last()));
    Ok(json!({"object": "list", "data": data, "first_id": first, "last_id": last, "has_more": has_more}))
}

fn wanted(query: &str) -> Result<Page, ApiError> {
    let mut page = Page { limit: LIMIT_DEFAULT, after: None, latest_first: true };
    for (name, value) in form_urlencoded::parse(query.as_bytes()) {
        match (&*name, &*value) {
            ("limit", limit) => {
                let limit = limit.parse().ok().filter(|limit| (1..=LIMIT_MAX).contains(limit));
                let what = format!("'limit' must be an integer from 1 to {LIMIT_MAX}.");
                page.limit = limit.ok_or_else(|| ApiError::invalid_value("limit", what))?;
            }
            ("after", _) => page.after = Some(value.into_owned()),
            ("order", "asc") => page.latest_first = false,
            ("order", "desc") => page.latest_first = true,
            ("order", _) => {
                return Err(ApiError::invalid_value("order", "'order' must be asc or desc."));
            }
            // Such as `include`, whose things no item here has.
            _ => {}
        }
    }
    Ok(page)
}

/// An item's own id, or one by its place: many clients send none.
fn id_of(response: &str, nth: usize, item: &RawValue) -> String {
    #[derive(serde::Deserialize)]
    struct Id {
        id: Option<String>,
    }
    let own = serde_json::from_str::<Id>(item.get()).ok().and_then(|item| item.id);
    own.filter(|id| !id.is_empty()).unwrap_or_else(|| {
        let of = response.strip_prefix("resp_").unwrap_or(response);
        format!("item_{of}_{nth}")
    })
}

/// An item as clients read it: a message in short is written out.
fn told(response: &str, nth: usize, raw: &RawValue) -> Value {
    let mut item: Value = serde_json::from_str(raw.get()).unwrap_or_default();
    let Some(fields) = item.as_object_mut() else { return item };
    let or = |fields: &mut serde_json::Map<String, Value>, name: &str, value: Value| {
        let field = fields.entry(name).or_insert(Value::Null);
        if field.is_null() {
            *field = value;
        }
    };
    fields.insert("id".to_owned(), id_of(response, nth, raw).into());
    or(fields, "type", "message".into());
    or(fields, "status", "completed".into());
    if let Some(Value::String(text)) = fields.get("content") {
        let part = if fields.get("role").is_some_and(|role| role == "assistant") {
            json!({"type": "output_text", "text": text, "annotations": []})
        } else {
            json!({"type": "input_text", "text": text})
        };
        fields.insert("content".to_owned(), json!([part]));
    }
    item
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::responses::store::State;

    fn kept() -> Kept {
        let input = r#"{"role":"user","content":"a"},{"type":"function_call_output","id":"fco_1","call_id":"c",
            "output":"b"},{"role":"assistant","content":"c","id":""}"#;
        Kept {
            response: "{}".into(),
            items: format!(r#"{input},{{"id":"msg_1"}}"#).into(),
            input_bytes: input.len(),
            state: State::Ended { in_background: false },
        }
    }

    #[test]
    fn items_come_a_page_at_a_time_in_either_order() {
        let ids = ["item_9_0", "fco_1", "item_9_2"];
        for (query, expected, has_more) in [
            ("order=asc", &ids[..], false),
            ("order=asc&limit=2", &ids[..2], true),
            ("order=asc&limit=2&after=fco_1", &ids[2..], false),
            ("limit=1&include[]=x", &ids[2..], true),
            ("after=fco%5F1", &ids[..1], false),
            ("after=item_9_0", &[], false),
        ] {
            let page = page("resp_9", &kept(), Some(query)).unwrap();
            let found: Vec<&str> =
                page["data"].as_array().unwrap().iter().map(|item| item["id"].as_str().unwrap()).collect();
            assert_eq!((&found[..], &page["has_more"]), (expected, &json!(has_more)), "{query}");
            assert_eq!(page["last_id"], json!(expected.last()), "{query}");
        }
        let all = page("resp_9", &kept(), None).unwrap();
        let [assistant, output, user] = [0, 1, 2].map(|nth| &all["data"][nth]);
        assert_eq!(user["content"], json!([{"type": "input_text", "text": "a"}]));
        assert_eq!(assistant["content"][0]["type"], "output_text");
        assert_eq!((&user["type"], &output["type"]), (&json!("message"), &json!("function_call_output")));
    }

    #[test]
    fn a_query_that_means_no_page_is_refused_by_its_name() {
        for (query, param) in [
            ("limit=0", "limit"),
            ("limit=101", "limit"),
            ("limit=x", "limit"),
            ("order=up", "order"),
            ("after=msg_1", "after"),
        ] {
            let error = page("resp_9", &kept(), Some(query)).unwrap_err();
            assert_eq!(error.detail().param.as_deref(), Some(param), "{query}");
        }
    }
}
