// The chosen theme is set before anything is drawn; without a choice the system's is used.
const chosen = localStorage.getItem("theme");
if (chosen === "dark" || chosen === "light") document.documentElement.dataset.theme = chosen;
