//! Budgets of one tenant: what is refused, told and remembered.

use keyway_core::Money;

use super::*;
use crate::ledger::By;

/// 2028-02-28T23:00:00Z: the next day is still February.
const NOW: u64 = 1_835_391_600;
const HOUR: u64 = 3_600;

fn tokens(tokens: u64) -> Outlay {
    Outlay { tokens, cost: Money::of_nanos(10 * tokens) }
}

fn account(table: &str, now: u64) -> Arc<Account> {
    let account = Account::new("a", TenantMetrics::alone(), Arc::new(OnceLock::from(7)));
    assert_eq!(account.allow(Some(&toml::from_str(table).unwrap()), now), Crossed::default());
    account
}

fn over(account: &Account, now: u64) -> OverBudget {
    match account.may_begin(now).unwrap_err() {
        Error::OverBudget(over) => *over,
        other => panic!("{other}"),
    }
}

#[test]
fn nothing_begins_where_nothing_is_left_until_the_next_day_or_month() {
    let account = account("tokens_per_day = 100\ntokens_per_month = 150", NOW);
    let _ = account.charge(tokens(99), NOW);
    account.may_begin(NOW).unwrap();
    let _ = account.charge(tokens(2), NOW);
    let told = over(&account, NOW);
    assert_eq!((told.retry_after, told.anew.as_str()), (Duration::from_secs(HOUR), "2028-02-29T00:00:00Z"));
    let text = Error::OverBudget(Box::new(told)).to_string();
    assert!(text.contains("101 of 100 are used; it begins anew at 2028-02-29T00:00:00Z"), "{text}");
    // The last second of the day is of that day, and the next one of another.
    assert_eq!(over(&account, NOW + HOUR - 1).retry_after, Duration::from_secs(1));
    account.may_begin(NOW + HOUR).unwrap();
    let _ = account.charge(tokens(49), NOW + HOUR);
    let told = over(&account, NOW + HOUR);
    assert_eq!((told.budget, told.used.as_str()), ("tokens in a month (budget.tokens_per_month)", "150"));
    assert_eq!(
        (told.anew.as_str(), told.retry_after),
        ("2028-03-01T00:00:00Z", Duration::from_secs(24 * HOUR))
    );
    account.may_begin(NOW + 25 * HOUR).unwrap();
}

#[test]
fn of_two_budgets_without_anything_left_the_longer_one_is_told() {
    let account = account("cost_per_day = 0.000001\ncost_per_month = 0.000001", NOW);
    let _ = account.charge(tokens(100), NOW);
    let told = over(&account, NOW);
    assert_eq!((told.budget, told.used.as_str()), ("cost in a month (budget.cost_per_month)", "0.000001"));
}

#[test]
fn what_is_set_aside_counts_until_it_is_settled() {
    let account = account("tokens_per_day = 100", NOW);
    let held = account.hold(tokens(60), NOW).unwrap();
    let other = account.hold(tokens(60), NOW).unwrap();
    let told = over(&account, NOW);
    assert_eq!((told.used.as_str(), told.held.as_str(), told.retry_after), ("0", "120", WHILE_HELD));
    assert!(account.hold(tokens(1), NOW).is_err());
    // Used less than was set aside; what was set aside goes as that comes.
    let _ = held.charge(tokens(5), NOW);
    account.may_begin(NOW).unwrap();
    let told = account.hold(tokens(35), NOW).map(drop);
    assert_eq!((told, account.kept.lock().held), (Ok(()), tokens(60)));
    drop(other);
    assert_eq!(account.kept.lock().held, Outlay::default());
    let _ = account.charge(tokens(94), NOW);
    account.may_begin(NOW).unwrap();
}

/// No moment has both what was set aside for a request and what it has used.
#[test]
fn what_is_set_aside_goes_as_what_is_used_comes() {
    for _ in 0..300 {
        let account = account("tokens_per_day = 100", NOW);
        let held = account.hold(tokens(60), NOW).unwrap();
        let is_over = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !is_over.load(Relaxed) {
                    account.may_begin(NOW).unwrap();
                }
            });
            std::thread::yield_now();
            let _ = held.charge(tokens(60), NOW);
            is_over.store(true, Relaxed);
        });
    }
}

#[test]
fn marks_are_told_once_and_the_header_says_what_is_left() {
    let account = account("tokens_per_day = 100\ncost_per_month = 0.00001\nwarn_at = 0.5", NOW);
    let crossed = |account: &Account, amount| {
        let crossed = account.charge(tokens(amount), NOW);
        account.tell(&crossed);
        crossed.0.iter().map(|(name, mark, ..)| (*name, *mark)).collect::<Vec<_>>()
    };
    assert_eq!((crossed(&account, 49), account.left(NOW)), (vec![], None));
    assert_eq!(crossed(&account, 1), [(BudgetName::TokensPerDay, BudgetMark::Warned)]);
    assert_eq!(account.left(NOW).unwrap(), "tokens_per_day=50");
    assert_eq!(crossed(&account, 900).len(), 2, "one is used up, and of the other one is warned");
    assert_eq!(account.left(NOW).unwrap(), "tokens_per_day=0, cost_per_month=0.0000005");
    assert_eq!(
        (crossed(&account, 1), account.left(NOW + HOUR).unwrap()),
        (vec![], "cost_per_month=0.00000049".parse().unwrap())
    );
    let count =
        |mark| account.counted.budget_crossings.with_label_values(&["a", "tokens_per_day", mark]).get();
    assert_eq!((count("warned"), count("used")), (1, 1));
}

#[test]
fn what_was_used_before_comes_from_the_ledger_and_meets_what_came_meanwhile() {
    let account = account("tokens_per_day = 1000\ntokens_per_month = 1000", NOW);
    let sums = |begins: [u64; 2], day, month| {
        let of =
            |amount| [("a".to_owned(), tokens(amount)), ("b".to_owned(), tokens(7))].into_iter().collect();
        [(begins[0], of(day)), (begins[1], of(month))]
    };
    let begins = [By::Day, By::Month].map(|by| by.time(NOW).start);
    assert!(!account.is_summed());
    let _ = account.charge(tokens(1), NOW);
    account.asks_sums(NOW);
    let _ = account.charge(tokens(10), NOW);
    let crossed = account.takes_sums(&sums(begins, 101, 901), NOW);
    assert_eq!(crossed.0.len(), 1, "of the month is warned: {crossed:?}");
    assert!(account.is_summed());
    let used =
        |account: &Account| account.kept.lock().at(NOW).map(|(_, budget)| budget.used()).collect::<Vec<_>>();
    assert_eq!(used(&account), [111, 911]);
    // A budget that is new asks for its own; sums of yesterday are not taken, and asked for again.
    let _ = account.allow(Some(&toml::from_str("tokens_per_day = 1000\ncost_per_day = 1").unwrap()), NOW);
    assert!(!account.is_summed());
    account.asks_sums(NOW);
    let _ = account.takes_sums(&sums([begins[0] - 24 * HOUR, begins[1]], 5, 5), NOW);
    assert_eq!((used(&account), account.is_summed()), (vec![111, 0], false));
    account.asks_sums(NOW);
    let _ = account.takes_sums(&sums(begins, 999, 999), NOW);
    assert_eq!((used(&account), account.is_summed()), (vec![111, 9_990], true));
}

#[test]
fn a_budget_that_is_raised_goes_on_and_one_that_goes_leaves_no_series() {
    let account = account("tokens_per_day = 100", NOW);
    let _ = account.charge(tokens(100), NOW);
    account.show(NOW);
    let _ = over(&account, NOW);
    let allow = |table: &str| account.allow(Some(&toml::from_str(table).unwrap()), NOW);
    let _ = allow("tokens_per_day = 101");
    account.may_begin(NOW).unwrap();
    let _ = account.charge(tokens(1), NOW);
    let _ = over(&account, NOW);
    let series = || prometheus::core::Collector::collect(&account.counted.budget_used)[0].get_metric().len();
    assert_eq!(series(), 1);
    let _ = account.allow(None, NOW);
    assert_eq!((series(), account.has_budget()), (0, false));
    account.may_begin(NOW).unwrap();
}

/// What the store is asked of one budget, and what it is told: 5 as of others, if the answer arrives.
fn exchange(account: &Account, others: u64) -> (String, u64, u64) {
    let mut questions = Vec::new();
    let asked = account.questions(&mut questions, NOW);
    assert_eq!((asked.len(), questions.len()), (1, 1));
    let _ = account.answer(asked[0], others, NOW);
    let LimitQuestion { key, number, about: About::Budget(question) } = questions.remove(0) else {
        panic!("of a budget")
    };
    assert_eq!(question.keep, Duration::from_secs(HOUR) + STORE_BUDGETS_KEEP);
    (key, number, question.own)
}

#[test]
fn what_others_have_used_counts_and_what_was_used_here_is_said_once_it_is_known() {
    let account = account("tokens_per_day = 1000", NOW);
    let begins = [By::Day, By::Month].map(|by| by.time(NOW).start);
    let used = |account: &Account| account.kept.lock().budgets[0].1.used();
    let key = format!("tokens_per_day:{}:a", begins[0]);
    let _ = account.charge(tokens(1), NOW);
    // Before the ledger's file is open nothing is said, and what was said before is taken for others'.
    assert_eq!(exchange(&account, 105), (key.clone(), 0, 0));
    assert_eq!((used(&account), account.is_said()), (106, false));
    account.asks_sums(NOW);
    let sums = begins.map(|begins| (begins, [("a".to_owned(), tokens(101))].into_iter().collect()));
    let _ = account.takes_sums(&sums, NOW);
    assert_eq!(used(&account), 101, "not twice");
    assert_eq!(exchange(&account, 5), (key.clone(), 7, 101));
    assert_eq!((used(&account), account.is_said()), (106, true));
    let _ = account.charge(tokens(894), NOW);
    assert!(!account.is_said() && account.may_begin(NOW).is_err());
    // A store that has lost all is told again.
    account.unsays();
    assert_eq!((exchange(&account, 0), used(&account)), ((key, 7, 995), 1_000));
}

/// So that what is known of one budget does not count twice while another one is new.
#[test]
fn a_new_budget_does_not_change_what_is_known_of_others() {
    let account = account("tokens_per_day = 1000", NOW);
    let begins = [By::Day, By::Month].map(|by| by.time(NOW).start);
    account.asks_sums(NOW);
    let _ = account.takes_sums(&begins.map(|begins| (begins, std::collections::HashMap::new())), NOW);
    let _ = account.charge(tokens(600), NOW);
    let _ = exchange(&account, 5);
    let both = toml::from_str("tokens_per_day = 1000\ntokens_per_month = 2000").unwrap();
    assert_eq!(account.allow(Some(&both), NOW), Crossed::default());
    let mut questions = Vec::new();
    let asked = account.questions(&mut questions, NOW);
    assert_eq!(questions.iter().map(|question| question.number).collect::<Vec<_>>(), [7, 0]);
    for (asked, others) in asked.into_iter().zip([5, 605]) {
        assert_eq!(account.answer(asked, others, NOW), Crossed::default());
    }
    let used: Vec<u64> = account.kept.lock().at(NOW).map(|(_, budget)| budget.used()).collect();
    assert_eq!(used, [605, 605]);
}

#[test]
fn an_answer_meets_the_budgets_of_its_question() {
    let account = account("tokens_per_day = 10\ntokens_per_month = 10", NOW);
    let mut questions = Vec::new();
    let asked = account.questions(&mut questions, NOW);
    let _ = account.allow(Some(&toml::from_str("tokens_per_month = 10").unwrap()), NOW);
    for (asked, others) in asked.into_iter().zip([100, 3]) {
        let _ = account.answer(asked, others, NOW);
    }
    assert_eq!(account.kept.lock().budgets[0].1.used(), 3);
    // Of a day that is over, nothing counts.
    let account = self::account("tokens_per_day = 10", NOW);
    let asked = account.questions(&mut questions, NOW);
    account.may_begin(NOW + HOUR).unwrap();
    let _ = account.answer(asked[0], 100, NOW + HOUR);
    account.may_begin(NOW + HOUR).unwrap();
}
