//! Models as Anthropic's clients list them, a page at a time.

use serde_json::{Value, json};

use crate::Refusal;

/// Models on a page, unless the client says how many.
const LIMIT_DEFAULT: usize = 20;
/// Models that a client may ask for on one page.
const LIMIT_MAX: usize = 1_000;

/// A model that is served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ListedModel {
    /// Its name.
    pub id: String,
    /// Since when, in Unix seconds; 0 where that is not known.
    pub created: u64,
    /// Tokens of a prompt at most, where that is known.
    pub max_input_tokens: Option<u64>,
}

impl ListedModel {
    /// What is said of it.
    pub fn told(&self) -> Value {
        json!({
            "type": "model",
            "id": self.id,
            "display_name": self.id,
            "created_at": date_time(self.created),
            "lifecycle": "active",
            "max_input_tokens": self.max_input_tokens,
        })
    }
}

/// Which page a client asks for.
#[derive(Debug)]
struct Page {
    limit: usize,
    after: Option<String>,
    before: Option<String>,
    /// Whether models that are served are among those asked for.
    active: bool,
}

/// A page of these models, which are in order; `query` says which, with `limit`, `after_id`, `before_id`.
///
/// # Errors
/// The query is not understood.
pub fn listed(models: &[ListedModel], query: Option<&str>) -> Result<Value, Refusal> {
    let Page { limit, after, before, active } = page(query.unwrap_or_default())?;
    let models = if active { models } else { &[] };
    let place = |name: &str, id: &Option<String>| {
        let Some(id) = id else { return Ok(None) };
        let at = models.iter().position(|model| model.id == *id);
        let unknown = || refused(name, &format!("names no model of this list. Ask without '{name}'."));
        at.map(Some).ok_or_else(unknown)
    };
    let (page, has_more) = match (place("after_id", &after)?, place("before_id", &before)?) {
        (Some(_), Some(_)) => return Err(refused("before_id", "does not go with 'after_id'. Send one.")),
        (_, Some(before)) => {
            let rest = &models[..before];
            (&rest[rest.len().saturating_sub(limit)..], rest.len() > limit)
        }
        (after, None) => {
            let rest = &models[after.map_or(0, |at| at + 1)..];
            (&rest[..rest.len().min(limit)], rest.len() > limit)
        }
    };
    let id = |model: Option<&ListedModel>| model.map(|model| model.id.clone());
    let data: Vec<Value> = page.iter().map(ListedModel::told).collect();
    Ok(json!({
        "data": data, "has_more": has_more, "first_id": id(page.first()), "last_id": id(page.last()),
    }))
}

fn page(query: &str) -> Result<Page, Refusal> {
    let mut page = Page { limit: LIMIT_DEFAULT, after: None, before: None, active: true };
    let mut stages = Vec::new();
    for (name, value) in form_urlencoded::parse(query.as_bytes()) {
        match &*name {
            "limit" => {
                let limit = value.parse().ok().filter(|limit| (1..=LIMIT_MAX).contains(limit));
                let what = format!("must be an integer from 1 to {LIMIT_MAX}.");
                page.limit = limit.ok_or_else(|| refused("limit", &what))?;
            }
            "after_id" => page.after = Some(value.into_owned()),
            "before_id" => page.before = Some(value.into_owned()),
            "lifecycle" | "lifecycle[]" => stages.push(value == "active"),
            // What other servers know says nothing of these models.
            _ => {}
        }
    }
    page.active = stages.is_empty() || stages.contains(&true);
    Ok(page)
}

fn refused(name: &str, what: &str) -> Refusal {
    Refusal { message: format!("'{name}' {what}"), param: Some(name.to_owned()) }
}

const DAY_SECONDS: u64 = 86_400;
/// Days of 400 years, after which the calendar is the same.
const ERA_DAYS: u64 = 146_097;

/// Unix seconds as RFC 3339 has them.
fn date_time(seconds: u64) -> String {
    let time = seconds % DAY_SECONDS;
    // Years from March on: the day that some years have more is then a year's last.
    let days = seconds / DAY_SECONDS + 719_468;
    let (era, day) = (days / ERA_DAYS, days % ERA_DAYS);
    let year_of_era = (day - day / 1_460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * day + 2) / 153;
    let day = day - (153 * from_march + 2) / 5 + 1;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    let year = 400 * era + year_of_era + u64::from(month <= 2);
    let (hour, minute, second) = (time / 3_600, time / 60 % 60, time % 60);
    format!("{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}Z")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn models(count: usize) -> Vec<ListedModel> {
        let model = |n| ListedModel { id: format!("m{n}"), created: n, max_input_tokens: None };
        (0..count as u64).map(model).collect()
    }

    #[test]
    fn a_page_is_cut_out_of_the_list() {
        for (query, ids, has_more) in [
            ("", &["m0", "m1", "m2", "m3", "m4"][..], false),
            ("limit=2", &["m0", "m1"], true),
            ("limit=2&after_id=m1", &["m2", "m3"], true),
            ("limit=2&after_id=m2", &["m3", "m4"], false),
            ("after_id=m4", &[], false),
            ("before_id=m4&limit=2", &["m2", "m3"], true),
            ("before_id=m%32&limit=2", &["m0", "m1"], false),
            ("before_id=m0", &[], false),
            ("lifecycle=retired", &[], false),
            ("lifecycle=retired&lifecycle=active&limit=1&beta=true", &["m0"], true),
        ] {
            let page = listed(&models(5), Some(query)).unwrap();
            let found: Vec<&str> =
                page["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
            assert_eq!((&found[..], &page["has_more"]), (ids, &json!(has_more)), "{query}");
            assert_eq!(page["first_id"], json!(ids.first()), "{query}");
            assert_eq!(page["last_id"], json!(ids.last()), "{query}");
        }
        assert_eq!(listed(&models(30), None).unwrap()["data"].as_array().unwrap().len(), LIMIT_DEFAULT);
    }

    #[test]
    fn a_query_that_means_no_page_is_refused_by_its_name() {
        for (query, param) in [
            ("limit=0", "limit"),
            ("limit=1001", "limit"),
            ("limit=many", "limit"),
            ("after_id=other", "after_id"),
            ("before_id=", "before_id"),
            ("after_id=m1&before_id=m2", "before_id"),
        ] {
            let refusal = listed(&models(5), Some(query)).unwrap_err();
            assert_eq!(refusal.param.as_deref(), Some(param), "{query}");
        }
    }

    #[test]
    fn a_model_says_when_it_began() {
        for (seconds, told) in [
            (0, "1970-01-01T00:00:00Z"),
            (951_782_399, "2000-02-28T23:59:59Z"),
            (951_782_400, "2000-02-29T00:00:00Z"),
            (951_868_800, "2000-03-01T00:00:00Z"),
            (1_735_689_599, "2024-12-31T23:59:59Z"),
            (1_795_910_400, "2026-11-29T00:00:00Z"),
            (4_107_542_400, "2100-03-01T00:00:00Z"),
        ] {
            assert_eq!(date_time(seconds), told);
        }
        let model = ListedModel { id: "m".to_owned(), created: 1, max_input_tokens: Some(8) }.told();
        assert_eq!((&model["type"], &model["max_input_tokens"]), (&json!("model"), &json!(8)));
        assert_eq!(date_time(u64::MAX).len(), "584554051223-11-09T07:00:15Z".len());
    }
}
