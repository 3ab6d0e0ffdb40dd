/* Before anything is painted: the theme that was chosen last, else what the system prefers. */
(function () {
  "use strict";
  let theme = null;
  try { theme = localStorage.getItem("stepscope-theme"); } catch (error) { /* storage is blocked: the system decides */ }
  if (theme !== "light" && theme !== "dark") theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
  (window.stepscope = window.stepscope || {}).chosenTheme = theme;
  document.documentElement.setAttribute("data-mantine-color-scheme", theme);
})();
