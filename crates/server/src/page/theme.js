"use strict";
// Runs before anything is drawn, so that a page that was chosen to be dark never flashes white.
try {
  const chosen = localStorage.getItem("qwill.theme");
  if (chosen) document.documentElement.dataset.theme = chosen;
} catch { /* no storage: as the system says */ }
