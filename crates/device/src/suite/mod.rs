//! One test-suite for every device: random shapes, boundaries, poisoned outputs, against the plain reference.
