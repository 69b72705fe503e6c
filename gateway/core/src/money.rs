//! Money in whole nano-units: 10⁻⁹ of a currency. Amounts are read from decimal numbers without rounding, and
//! their sums are integers, so that neither their order nor their grouping changes them.

use std::fmt;

/// Decimal places of an amount.
const PLACES: usize = 9;

/// Decimal places of a price: of a million tokens in micro-units, so of one token in pico-units.
const PRICE_PLACES: usize = 6;

/// Pico-units in a nano-unit.
const PICOS: u128 = 1_000;

/// An amount of whichever currency the configuration names.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Money(u64);

/// What a token costs, by its kind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Price {
    /// Pico-units for a prompt token that was computed.
    prompt: u64,
    /// For one that a worker had cached.
    cached: u64,
    /// For a generated one.
    generated: u64,
}

impl Money {
    /// So many nano-units, of which 10⁹ are a unit of the currency.
    pub const fn of_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// In nano-units: 10⁻⁹ of a unit of the currency.
    pub const fn nanos(self) -> u64 {
        self.0
    }

    /// Both together; the most that fits, where that is more.
    #[must_use]
    pub const fn plus(self, more: Self) -> Self {
        Self(self.0.saturating_add(more.0))
    }

    /// Without `less`; 0 where that is more.
    #[must_use]
    pub const fn minus(self, less: Self) -> Self {
        Self(self.0.saturating_sub(less.0))
    }

    /// A decimal number as it was written; `None`: below 0, above what fits (some 18 billion), or with more
    /// than nine decimal places.
    pub fn of_decimal(amount: f64) -> Option<Self> {
        scaled(amount, PLACES).map(Self)
    }
}

impl fmt::Display for Money {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let unit = 10_u64.pow(PLACES as u32);
        let (whole, below) = (self.0 / unit, self.0 % unit);
        if below == 0 {
            return write!(f, "{whole}");
        }
        let digits = format!("{below:0PLACES$}");
        write!(f, "{whole}.{}", digits.trim_end_matches('0'))
    }
}

impl Price {
    /// Prices of a million tokens; `None`: one is below 0, too high, or has more than six decimal places.
    pub fn per_million(prompt: f64, cached: f64, generated: f64) -> Option<Self> {
        let pico = |price| scaled(price, PRICE_PLACES);
        Some(Self { prompt: pico(prompt)?, cached: pico(cached)?, generated: pico(generated)? })
    }

    /// What a request costs that had so many tokens, cached ones among the prompt's: whole nano-units, and
    /// what is less than one counts as one.
    pub fn cost(&self, prompt: u64, cached: u64, generated: u64) -> Money {
        let cached = cached.min(prompt);
        let of = |tokens: u64, price: u64| u128::from(tokens) * u128::from(price);
        // Each is below 2^128 by itself; together they may not be.
        let picos = of(prompt - cached, self.prompt)
            .saturating_add(of(cached, self.cached))
            .saturating_add(of(generated, self.generated));
        Money(u64::try_from(picos.div_ceil(PICOS)).unwrap_or(u64::MAX))
    }
}

/// A decimal number times ten to the power of `places`, where that is whole. By its digits: these are the
/// fewest that tell the number from its neighbours, so they are those that were written.
fn scaled(number: f64, places: usize) -> Option<u64> {
    if !number.is_finite() || number < 0.0 {
        return None;
    }
    let text = number.abs().to_string();
    let (whole, below) = text.split_once('.').unwrap_or((&text, ""));
    if below.len() > places {
        return None;
    }
    format!("{whole}{below:0<places$}").parse().ok()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_is_written_is_meant() {
        for (number, text) in [
            (0.0, "0"),
            (0.1, "0.1"),
            (12.5, "12.5"),
            (3.0, "3"),
            (0.000_000_001, "0.000000001"),
            (18_000_000_000.0, "18000000000"),
            (1_234.567_891, "1234.567891"),
        ] {
            assert_eq!(Money::of_decimal(number).unwrap().to_string(), text);
        }
        for wrong in [-1.0, f64::NAN, f64::INFINITY, 1e-10, 2e10, 1e300, 0.1 + 0.2] {
            assert_eq!(Money::of_decimal(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn cached_tokens_have_a_price_of_their_own_and_are_among_the_prompt_s() {
        let price = Price::per_million(2.5, 0.25, 10.0).unwrap();
        assert_eq!(price.cost(1_000_000, 0, 0), Money::of_decimal(2.5).unwrap());
        assert_eq!(price.cost(1_000_000, 1_000_000, 0), Money::of_decimal(0.25).unwrap());
        assert_eq!(price.cost(40, 32, 2), Money::of_nanos(8 * 2_500 + 32 * 250 + 2 * 10_000));
        assert_eq!(price.cost(1, 9, 0), Money::of_nanos(250), "no more can be cached than there is");
        // A tenth of a nano-unit is one; a million times it is not a million.
        let cheap = Price::per_million(0.0001, 0.0001, 0.0001).unwrap();
        assert_eq!((cheap.cost(1, 0, 0).nanos(), cheap.cost(1_000_000, 0, 0).nanos()), (1, 100_000));
        assert_eq!(price.cost(u64::MAX, 0, u64::MAX).nanos(), u64::MAX, "too much is the most");
        assert!(Price::per_million(0.000_000_1, 0.0, 0.0).is_none());
    }

    proptest! {
        /// What is shown is read again as the same.
        #[test]
        fn an_amount_is_shown_exactly(nanos in 0..1_000_000_000_000_000_u64) {
            let shown = Money::of_nanos(nanos).to_string();
            prop_assert_eq!(Money::of_decimal(shown.parse().unwrap()).map(Money::nanos), Some(nanos));
        }

        /// A request costs what its tokens cost one by one, but for less than a nano-unit.
        #[test]
        fn a_cost_is_the_sum_of_its_tokens(
            pico in prop::array::uniform3(0..1_000_000_000_u64),
            tokens in prop::array::uniform3(0..10_000_000_u64),
        ) {
            let [prompt, cached, generated] = pico.map(|pico| pico as f64 / 1e6);
            let price = Price::per_million(prompt, cached, generated).unwrap();
            let [computed, cached, generated] = tokens;
            let exact: u128 = tokens.into_iter().zip(pico).map(|(n, pico)| u128::from(n) * u128::from(pico)).sum();
            let cost = price.cost(computed + cached, cached, generated);
            // In this order: computed, cached, generated.
            let exact_cost = u128::from(cost.nanos()) * 1_000;
            prop_assert!(exact_cost >= exact && exact_cost - exact < 1_000, "{exact_cost} {exact}");
        }
    }
}
