//! Budgets of all tenants: what was used before this process is asked of the ledger, and how they stand is
//! shown, both now and then and off the threads that serve.

use std::sync::{
    Arc,
    atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
};

use tokio::task::spawn_blocking;

use super::{Account, Tenant, Tenants};
use crate::clock;

/// What was seen of where sums come from.
#[derive(Debug, Default)]
pub(super) struct Watched {
    /// It was said that the ledger cannot tell them.
    lacks_sums: AtomicBool,
    /// Connections to the store of which the budgets know.
    links: AtomicUsize,
}

impl Tenants {
    /// Learns what was used before of budgets of which that is not known, and shows how all stand. To be
    /// called about once a second.
    pub async fn keep_budgets(self: Arc<Self>) {
        if self.accounts().iter().any(|account| !account.is_summed()) {
            let this = Arc::clone(&self);
            // A panic was logged; it is tried again.
            let _ = spawn_blocking(move || this.sum_budgets()).await;
        }
        let now = clock::unix_seconds() as u64;
        for account in self.accounts() {
            account.show(now);
        }
        if let Some(shared) = &self.held_by.shared {
            let links = shared.links();
            if self.watched.links.swap(links, Relaxed) != links {
                self.accounts().iter().for_each(|account| account.unsays());
            }
            // Also of those without requests, so that the next one is not judged by what was long ago.
            let tenants: Vec<_> = self.current.read().by_name.values().cloned().collect();
            tenants.iter().for_each(Tenant::asks_of_budgets);
        }
    }

    /// Learns what was used before of budgets of which that is not known. Reads the ledger's file.
    pub fn sum_budgets(&self) {
        let accounts: Vec<_> = self.accounts().into_iter().filter(|account| !account.is_summed()).collect();
        let Some(ledger) = self.held_by.ledger.as_ref().filter(|_| !accounts.is_empty()) else { return };
        let now = clock::unix_seconds() as u64;
        let asked = || accounts.iter().for_each(|account| account.asks_sums(now));
        let Ok(sums) = ledger.sums(now, asked) else {
            if !self.watched.lacks_sums.swap(true, Relaxed) {
                tracing::warn!(
                    "what tenants have used of their budgets before is not known until the usage file is open"
                );
            }
            return;
        };
        self.watched.lacks_sums.store(false, Relaxed);
        for account in accounts {
            let crossed = account.takes_sums(&sums, now);
            account.tell(&crossed);
        }
    }

    fn accounts(&self) -> Vec<Arc<Account>> {
        self.current.read().accounts.values().filter(|account| account.has_budget()).cloned().collect()
    }
}
