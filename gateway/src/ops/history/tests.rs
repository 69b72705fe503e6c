//! What an hour has of models and tenants, and how large it may get.

use super::{gains::OTHERS, *};

fn totals(model: &str, ended: u64) -> ModelTotals {
    let mut ttft = [0; TTFT_BUCKETS.len() + 1];
    ttft[3] = ended;
    let (failed, prompt_tokens, cached_tokens) = (ended / 10, 100 * ended, 25 * ended);
    ModelTotals { model: model.to_owned(), ended, failed, ttft, prompt_tokens, cached_tokens }
}

fn of_tenant(tenant: &str, admitted: u64, refused: u64, prompt_tokens: u64) -> TenantTotals {
    TenantTotals { tenant: tenant.to_owned(), admitted, refused, prompt_tokens }
}

/// A sample of these models.
fn of_models(models: Vec<ModelTotals>, at: f64) -> Now {
    Now { at, models, ..Now::default() }
}

fn requests(hour: &Hour) -> Vec<(&str, &[u64])> {
    hour.models.iter().map(|model| (&*model.model, &*model.requests)).collect()
}

#[test]
fn each_sample_has_what_was_gained_and_models_come_late() {
    let history = History::default();
    history.sample(Now { in_flight: 1, ..of_models(vec![totals("a", 10)], 100.0) });
    let both = vec![totals("a", 10), totals("b", 20)];
    history.sample(Now { in_flight: 2, waiting: 1, ..of_models(both, 110.0) });
    history.sample(of_models(vec![totals("a", 30), totals("b", 20)], 120.0));
    let hour = history.hour();
    assert_eq!(
        (&*hour.at, &*hour.in_flight, &*hour.waiting),
        (&[100.0, 110.0, 120.0][..], &[1, 2, 0][..], &[0, 1, 0][..])
    );
    let want: [(&str, &[u64]); 3] = [("all", &[10, 20, 20]), ("a", &[10, 0, 20]), ("b", &[0, 20, 0])];
    assert_eq!(requests(&hour), want);
    assert_eq!(
        (&*hour.models[0].failed, &*hour.models[1].hit_rate),
        (&[1, 2, 2][..], &[Some(0.25), None, Some(0.25)][..])
    );
    // Between 25 and 50 ms.
    assert!((hour.models[0].ttft_p50_s[0].unwrap() - 0.0375).abs() < 1e-9);
    assert!(hour.tenants.is_empty() && hour.traffic.is_empty());
}

#[test]
fn a_first_token_counts_though_its_answer_goes_on() {
    let history = History::default();
    history.sample(of_models(vec![totals("a", 10)], 0.0));
    let mut later = totals("a", 10);
    later.ttft[3] += 1;
    history.sample(of_models(vec![later], 10.0));
    let hour = history.hour();
    assert_eq!((&*hour.models[1].requests, hour.models[1].ttft_p50_s[1]), (&[10, 0][..], Some(0.0375)));
}

#[test]
fn an_hour_is_kept_and_of_very_many_models_the_busiest() {
    let history = History::default();
    for step in 0..MAX_HISTORY_STEPS as u64 + 5 {
        let models = (0..40).map(|model| totals(&format!("m{model:02}"), (step + 1) * (model + 1)));
        history.sample(of_models(models.collect(), step as f64));
    }
    let hour = history.hour();
    assert_eq!((hour.at.len(), hour.at[0]), (MAX_HISTORY_STEPS, 5.0));
    assert_eq!(hour.models.len(), 1 + MAX_HISTORY_MODELS);
    let others = hour.models.iter().find(|model| model.model == OTHERS).unwrap();
    // Nine models of 1 to 9 requests a step.
    assert_eq!((others.requests[7], hour.models[0].requests[7]), (45, (1..=40).sum()));
}

#[test]
fn models_that_take_turns_are_no_more_rows_than_an_hour_may_have() {
    let history = History::default();
    let turns = MAX_HISTORY_MODELS + 8;
    let mut sums = vec![0; turns];
    for step in 0..2 * turns {
        sums[step % turns] += 1 + step as u64 % turns as u64;
        let models = sums.iter().enumerate().map(|(model, sum)| totals(&format!("m{model:02}"), *sum));
        history.sample(of_models(models.filter(|model| model.ended > 0).collect(), step as f64));
    }
    let hour = history.hour();
    assert_eq!(hour.models.len(), 1 + MAX_HISTORY_MODELS);
    let rows = requests(&hour);
    let others = rows.iter().find(|(model, _)| *model == OTHERS).unwrap().1;
    // The nine models with the fewest requests: 1 to 9 in each of their two turns.
    assert_eq!((&others[..10], others.iter().sum::<u64>()), (&[1, 2, 3, 4, 5, 6, 7, 8, 9, 0][..], 90));
    assert_eq!(rows[0].1.iter().sum::<u64>(), rows[1..].iter().flat_map(|row| row.1).sum::<u64>());
}

#[test]
fn tenants_have_rows_where_there_are_tenants() {
    let history = History::default();
    let sample = |tenants| history.sample(Now { tenants, ..Now::default() });
    sample(Some(Vec::new()));
    assert_eq!(history.hour().tenants.len(), 1, "all of them, of whom nothing is known yet");
    sample(Some(vec![of_tenant("a", 5, 1, 0), of_tenant("b", 7, 0, 70)]));
    // The prompt tokens of one come with its answers, later; the other has new limits.
    sample(Some(vec![of_tenant("a", 5, 1, 500), of_tenant("b", 8, 0, 20)]));
    let hour = history.hour();
    let rows: Vec<_> = hour.tenants.iter().map(|of| (&*of.tenant, &*of.requests, &*of.refused)).collect();
    let want: [(&str, &[u64], &[u64]); 3] =
        [("all", &[0, 12, 1], &[0, 1, 0]), ("a", &[0, 5, 0], &[0, 1, 0]), ("b", &[0, 7, 1], &[0, 0, 0])];
    assert_eq!(rows, want);
    let tokens: Vec<_> = hour.tenants.iter().map(|of| &*of.prompt_tokens).collect();
    let want: [&[u64]; 3] = [&[0, 70, 520], &[0, 0, 500], &[0, 70, 20]];
    assert_eq!(tokens, want);
    sample(None);
    assert!(history.hour().tenants.is_empty());
}

#[test]
fn of_very_many_tenants_the_busiest_have_rows() {
    let history = History::default();
    let tenants = (0..1_000).map(|i| of_tenant(&format!("t{i:03}"), i, 0, 10 * i));
    history.sample(Now { tenants: Some(tenants.collect()), ..Now::default() });
    let hour = history.hour();
    assert_eq!(hour.tenants.len(), 1 + MAX_HISTORY_TENANTS);
    let others = hour.tenants.iter().find(|of| of.tenant == OTHERS).unwrap();
    let rest: u64 = (0..1_000 - (MAX_HISTORY_TENANTS as u64 - 1)).sum();
    assert_eq!((others.requests[0], others.prompt_tokens[0]), (rest, 10 * rest));
}

/// A thousand workers, fifty models and a thousand tenants, all busy, with counts of many digits.
#[test]
fn the_hour_of_a_large_fleet_is_two_megabytes_at_most() {
    let history = History::default();
    for step in 0..MAX_HISTORY_STEPS as u64 {
        // Who is busiest changes with each step.
        let gain = |i: u64| 1_000 * (step + 1) + (i * 7 + step * 13) % 997;
        let models = (0..50).map(|i| {
            let mut model = totals(&format!("organisation/a-model-of-a-long-name-{i}"), (step + 1) * gain(i));
            model.cached_tokens /= 3;
            model
        });
        let tenant = |i| of_tenant(&format!("a-tenant-{i}"), (step + 1) * gain(i), step, 1_000 * gain(i));
        let worker = |i| Choices {
            worker: format!("a-worker-{i}.of-a-service.of-a-namespace:8000"),
            models: format!("organisation/a-model-of-a-long-name-{}", i % 50),
            times: gain(i),
        };
        history.sample(Now {
            at: 1_764_310_879.123_456 + 10.0 * step as f64,
            in_flight: 12_345,
            waiting: 6_789,
            models: models.collect(),
            tenants: Some((0..1_000).map(tenant).collect()),
            workers: (0..1_000).map(worker).collect(),
        });
    }
    let bytes = serde_json::to_vec(&history.hour()).unwrap().len();
    assert!((300_000..2_000_000).contains(&bytes), "{bytes} bytes");
}

#[test]
fn a_quantile_above_the_last_edge_is_that_edge_and_of_nothing_none() {
    let mut counts = [0; TTFT_BUCKETS.len() + 1];
    assert_eq!(quantile(&counts, 0.5), None);
    counts[TTFT_BUCKETS.len()] = 3;
    assert_eq!(quantile(&counts, 0.5), Some(300.0));
}
