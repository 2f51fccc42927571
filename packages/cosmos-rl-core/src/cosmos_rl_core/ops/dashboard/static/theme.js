// The theme is set before the first paint, so that the page does not flash.
const chosen = localStorage.getItem('cosmos-rl.theme')
document.documentElement.dataset.theme = chosen ?? (matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light')
