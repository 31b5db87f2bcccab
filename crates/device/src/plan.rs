//! The memory plan: every byte, computed from shapes before anything is allocated.
