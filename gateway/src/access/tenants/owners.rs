//! Numbers by which the index tells tenants' blocks apart. A number follows from its tenant's name, and is
//! the next free one where another tenant has it: so it mostly stays the same over a restart, after which a
//! snapshot's blocks still count as their tenant's. Of more than 255 tenants some have one in common, and one
//! part of the index.

use keyway_core::index::Owner;

use super::file::number_of;

/// The numbers that tenants have.
pub(super) struct Numbers([bool; 1 << u8::BITS]);

impl Numbers {
    /// Those of tenants that keep theirs.
    pub(super) fn kept(owners: impl Iterator<Item = Owner>) -> Self {
        let mut taken = [false; 1 << u8::BITS];
        owners.for_each(|owner| taken[usize::from(owner.0)] = true);
        Self(taken)
    }

    /// One for a tenant of this name.
    pub(super) fn give(&mut self, name: &str) -> Owner {
        // 0 stands for no tenant.
        let of = |number: u32| (number % u32::from(u8::MAX)) as u8 + 1;
        let wanted = number_of(name) % u32::from(u8::MAX);
        let free = (wanted..wanted + u32::from(u8::MAX)).map(of).find(|number| !self.0[usize::from(*number)]);
        let number = free.unwrap_or_else(|| of(wanted));
        self.0[usize::from(number)] = true;
        Owner(number)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn numbers_differ_as_long_as_there_are_some_and_follow_from_names() {
        let names: Vec<String> = (0..300).map(|i| format!("tenant {i}")).collect();
        let mut numbers = Numbers::kept(std::iter::empty());
        let given: Vec<Owner> = names.iter().map(|name| numbers.give(name)).collect();
        assert_eq!(given[..255].iter().collect::<HashSet<_>>().len(), 255);
        assert!(!given.contains(&Owner::NOBODY));
        // Alone, each has the number of its name; beside who has that already, another one.
        let alone = |name: &str| Numbers::kept(std::iter::empty()).give(name);
        assert_eq!(alone(&names[0]), given[0]);
        assert!(names[255..].iter().zip(&given[255..]).all(|(name, number)| alone(name) == *number));
        assert_ne!(Numbers::kept(std::iter::once(given[0])).give(&names[0]), given[0]);
    }
}
