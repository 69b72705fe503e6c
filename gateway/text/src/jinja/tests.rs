//! What the goldens do not show: bounds.
