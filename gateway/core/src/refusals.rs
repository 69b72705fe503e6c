//! Which kinds of requests a worker refuses, and until when it is left alone with them: a small state machine
//! for each kind (a path and a model), fed with refusals and with answers. A kind that was refused is the
//! worker's no more for a pause: what `Retry-After` says, else one that is short at first and doubles; then
//! one request at a time tries it, and a good answer ends it.
//!
//! Busy is not dead: nothing here ejects a worker or forgets what it holds, and where all refuse, all are
//! asked. A refusal that may be the request's own fault counts until that is known (an accusation); it is
//! *convicted* of it when another worker served the same request, and *dismissed* when others refused it too.
//! No clock: time is the `Duration` since the start.

use std::time::Duration;

/// Pause after the first refusal: a queue that is full for a moment costs its worker no more. Each further
/// one doubles it.
pub const FIRST_PAUSE: Duration = Duration::from_millis(50);
/// Longest pause without a `Retry-After`: how late a worker that takes requests again is noticed at most.
pub const MAX_PAUSE: Duration = Duration::from_secs(15);
/// Longest `Retry-After` that is heeded: what a worker says of its own hour is not believed for so long.
pub const RETRY_AFTER_MAX: Duration = Duration::from_secs(60);
/// Shortest and longest time after which a trial that was not refused counts as taken, and the next one may
/// begin. In between it is twice the time that the last refusal took: who refuses at once would have refused
/// by then.
pub const TRIAL_PATIENCE: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));
/// Convictions in a row, with no good answer between them, by which a worker counts as misconfigured.
pub const CONVICTIONS: u32 = 3;
/// Kinds kept of one worker, at 80 bytes each; beyond it the one that was refused first goes.
pub const KINDS_MAX: usize = 32;
/// Where all refuse: how much later than the first one's another pause may end.
const SLACK: Duration = FIRST_PAUSE.saturating_mul(2);

/// How a worker stands to a kind of request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stance {
    /// It takes them, as far as known, or may be tried.
    Willing,
    /// One is trying it.
    OnTrial,
    /// It is left alone until then.
    Refusing(Duration),
}

/// What one worker refuses.
#[derive(Debug, Clone, Default)]
pub struct Refusals {
    kinds: Vec<Known>,
    /// Counts the times that a kind began to be refused.
    bouts: u64,
}

#[derive(Debug, Clone)]
struct Known {
    kind: u64,
    bout: u64,
    /// When the bout began.
    since: Duration,
    /// Requests sent from then on try it; what becomes of those sent before was known already.
    open_from: Duration,
    on_trial: bool,
    /// When it last began to be left alone: answers to requests sent before say nothing new.
    refused_at: Duration,
    /// How long that refusal took.
    took: Duration,
    /// Trials in a row that were refused, and the first refusal.
    in_a_row: u32,
    convictions: u32,
}

/// One refusal's mark, by which it can be convicted or dismissed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mark {
    kind: u64,
    bout: u64,
    /// The refusal at whose time the pause began, if this one is it.
    news: Option<Duration>,
}

impl Refusals {
    /// Whether nothing is refused.
    pub fn is_empty(&self) -> bool {
        self.kinds.is_empty()
    }

    /// How it stands to a kind.
    pub fn stance(&self, kind: u64, now: Duration) -> Stance {
        match self.find(kind) {
            Some(known) if known.on_trial && now < known.open_from + known.patience() => Stance::OnTrial,
            Some(known) if now < known.open_from => Stance::Refusing(known.open_from),
            _ => Stance::Willing,
        }
    }

    /// A request of this kind goes there: a trial, if the pause is over.
    pub fn begin(&mut self, kind: u64, now: Duration) {
        if self.stance(kind, now) == Stance::Willing
            && let Some(known) = self.find_mut(kind)
        {
            (known.on_trial, known.open_from) = (true, now);
        }
    }

    /// It refused one that was `sent` then.
    pub fn refused(
        &mut self,
        kind: u64,
        sent: Duration,
        now: Duration,
        retry_after: Option<Duration>,
    ) -> Mark {
        let asked_for = now + retry_after.unwrap_or_default().min(RETRY_AFTER_MAX);
        if let Some(known) = self.find_mut(kind) {
            let is_news = sent >= known.open_from;
            if is_news {
                known.refuse(sent, now);
            }
            if !known.on_trial {
                known.open_from = known.open_from.max(asked_for);
            }
            return Mark { kind, bout: known.bout, news: is_news.then_some(now) };
        }
        if self.kinds.len() >= KINDS_MAX {
            self.kinds.remove(0);
        }
        self.bouts += 1;
        let mut new = Known::new(kind, self.bouts, now);
        new.refuse(sent, now);
        new.open_from = new.open_from.max(asked_for);
        self.kinds.push(new);
        Mark { kind, bout: self.bouts, news: Some(now) }
    }

    /// It served one that was `sent` then: if that is news, it takes them again. Returns whether it was
    /// misconfigured.
    pub fn served(&mut self, kind: u64, sent: Duration) -> bool {
        let Some(at) = self.kinds.iter().position(|known| known.kind == kind && sent > known.refused_at)
        else {
            return false;
        };
        self.kinds.remove(at).convictions >= CONVICTIONS
    }

    /// The refusal was the request's own fault: as if it had not been.
    pub fn dismiss(&mut self, mark: Mark, now: Duration) {
        let Some(known) = self.of_mark(mark).filter(|known| mark.news == Some(known.refused_at)) else {
            return;
        };
        known.in_a_row -= 1;
        (known.on_trial, known.open_from) = (false, now);
        if known.in_a_row == 0 {
            self.kinds.retain(|known| known.bout != mark.bout);
        }
    }

    /// Another worker served the very request. Returns whether that makes this one misconfigured.
    pub fn convict(&mut self, mark: Mark) -> bool {
        // Those that were on their way when the first was refused are one case.
        let Some(known) = self.of_mark(mark).filter(|_| mark.news.is_some()) else { return false };
        known.convictions += 1;
        known.convictions == CONVICTIONS
    }

    /// Whether it refuses what others serve, and has served nothing since it began to: it last served
    /// something then.
    pub fn misconfigured(&self, last_served: Option<Duration>) -> bool {
        let since = |known: &Known| last_served.is_none_or(|served| served <= known.since);
        self.kinds.iter().any(|known| known.convictions >= CONVICTIONS && since(known))
    }

    fn find(&self, kind: u64) -> Option<&Known> {
        self.kinds.iter().find(|known| known.kind == kind)
    }

    fn find_mut(&mut self, kind: u64) -> Option<&mut Known> {
        self.kinds.iter_mut().find(|known| known.kind == kind)
    }

    fn of_mark(&mut self, mark: Mark) -> Option<&mut Known> {
        self.kinds.iter_mut().find(|known| known.kind == mark.kind && known.bout == mark.bout)
    }
}

impl Known {
    fn new(kind: u64, bout: u64, since: Duration) -> Self {
        Self {
            kind,
            bout,
            since,
            open_from: since,
            on_trial: false,
            refused_at: since,
            took: Duration::ZERO,
            in_a_row: 0,
            convictions: 0,
        }
    }

    fn refuse(&mut self, sent: Duration, now: Duration) {
        let pause = FIRST_PAUSE.saturating_mul(1 << self.in_a_row.min(16)).min(MAX_PAUSE);
        self.in_a_row = self.in_a_row.saturating_add(1);
        (self.on_trial, self.open_from, self.refused_at) = (false, now + pause, now);
        self.took = now.saturating_sub(sent);
    }

    fn patience(&self) -> Duration {
        let (least, most) = TRIAL_PATIENCE;
        (2 * self.took).clamp(least, most)
    }
}

/// Who may be asked, of workers that stand so: those that are willing; where none is, those on trial; else
/// those whose pause ends first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Eligible(Stance);

impl Eligible {
    /// Goes by the best stance of these workers, and of several pauses by the one that ends first.
    pub fn among(stances: impl Iterator<Item = Stance>) -> Self {
        let better = |one: Stance, other: Stance| match (one, other) {
            (Stance::Refusing(one), Stance::Refusing(other)) => Stance::Refusing(one.min(other)),
            (Stance::Willing, _) | (_, Stance::Willing) => Stance::Willing,
            _ => Stance::OnTrial,
        };
        Self(stances.reduce(better).unwrap_or(Stance::Willing))
    }

    /// Whether one that stands so is among them.
    pub fn has(self, stance: Stance) -> bool {
        match (self.0, stance) {
            (Stance::Refusing(first), Stance::Refusing(until)) => until <= first + SLACK,
            (best, stance) => best == stance,
        }
    }
}

#[cfg(test)]
mod tests;
