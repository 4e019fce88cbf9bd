# SPDX-License-Identifier: Apache-2.0
"""How the page looks on a desktop, on a phone and in print, and the few lines that make its plots answer."""

CSS = """
:root { color-scheme: light; --ink: #1a1d21; --soft: #5b626b; --line: #dfe3e8; --wash: #f6f7f9;
  --sure: #0072b2; --open: #b8860b; --bad: #b5400a; }
* { box-sizing: border-box; }
body { margin: 0; background: #fff; color: var(--ink); font: 16px/1.5 system-ui, "Segoe UI", Roboto,
  "Helvetica Neue", "DejaVu Sans", Arial, sans-serif; }
main { max-width: 74rem; margin: 0 auto; padding: 1.5rem 1.25rem 4rem; }
header { border-bottom: 2px solid var(--ink); margin-bottom: 1.25rem; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.2rem 0 .6rem; }
h3 { font-size: 1rem; margin: 1rem 0 .4rem; }
header p { margin: .25rem 0 .6rem; color: var(--soft); font-size: .9rem; }
.badge { font-size: .85rem; font-weight: 600; vertical-align: middle; padding: .15rem .55rem;
  border: 1.5px solid var(--bad); color: var(--bad); border-radius: 1rem; white-space: nowrap; }
.verdict { display: grid; gap: .8rem; grid-template-columns: repeat(auto-fit, minmax(17rem, 1fr)); }
.verdict article { border: 1px solid var(--line); border-left: 5px solid var(--sure); border-radius: 4px;
  padding: .7rem .9rem; background: var(--wash); }
.verdict article.open { border-left-color: var(--open); }
.verdict article.bad { border-left-color: var(--bad); }
.verdict h2 { font-size: 1rem; margin: 0 0 .3rem; display: flex; justify-content: space-between; gap: .5rem; }
.verdict p { margin: 0; }
.state { font-size: .75rem; font-weight: 600; color: var(--sure); white-space: nowrap; padding-top: .15rem; }
.open .state { color: #7a5a00; }
.bad .state { color: var(--bad); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: .84rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .35rem .42rem; border-bottom: 1px solid var(--line); vertical-align: top; }
thead th { border-bottom: 1.5px solid var(--ink); font-weight: 600; vertical-align: bottom; }
tbody th { font-weight: 600; white-space: nowrap; }
tr.flagged { background: #fdf1ea; color: #5d3a26; }
tr.flagged td:last-child { min-width: 16rem; }
.note, figcaption { color: var(--soft); font-size: .85rem; }
.plots { display: grid; gap: 1.5rem 2rem; grid-template-columns: repeat(auto-fit, minmax(min(100%, 26rem), 1fr)); }
figure { margin: 0; min-width: 0; }
figure svg { width: 100%; height: auto; display: block; }
figure svg text { font-family: "DejaVu Sans", system-ui, Verdana, sans-serif !important; }
svg .tip { cursor: pointer; }
svg .tip:hover { filter: brightness(.7); }
#tip { position: fixed; z-index: 9; max-width: min(22rem, 90vw); padding: .4rem .6rem; border-radius: 4px;
  background: var(--ink); color: #fff; font-size: .8rem; line-height: 1.35; pointer-events: none; }
details { border-top: 1px solid var(--line); margin-top: 1.2rem; padding-top: .6rem; }
summary { cursor: pointer; font-weight: 600; font-size: 1.05rem; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: .25rem 1rem; font-size: .9rem; }
dt { font-weight: 600; }
dd { margin: 0; min-width: 0; overflow-wrap: anywhere; }
code { font-size: .85em; }
@media screen and (max-width: 40rem) {
  body { font-size: 15px; }
  main { padding: 1rem .9rem 3rem; }
  h1 { font-size: 1.35rem; }
  dl { grid-template-columns: 1fr; gap: .1rem; }
  dd { margin-bottom: .5rem; }
  .headline thead { display: none; }
  .headline tr, .headline th, .headline td { display: block; border: 0; padding: .2rem 0; }
  .headline tr { border-bottom: 1px solid var(--line); padding: .5rem 0; }
  .headline tbody th { font-size: 1.05rem; }
  .headline td { display: flex; justify-content: space-between; gap: 1rem; font-weight: 600; text-align: right; }
  .headline td::before { content: attr(data-label); color: var(--soft); font-weight: 400; text-align: left; }
}
@media print {
  @page { size: A4; margin: 14mm; }
  body { font-size: 10pt; }
  main { max-width: none; padding: 0; }
  .verdict { grid-template-columns: 1fr 1fr; }
  .verdict article, figure, tr { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  .plots { display: block; font-size: 0; orphans: 1; widows: 1; }
  figure { display: inline-block; width: 48%; margin: 0 1% .6rem 0; font-size: 9pt; vertical-align: top; }
  .scroll { overflow: visible; }
  table { font-size: 7.5pt; }
  th, td { padding: .2rem .3rem; }
  tbody th { white-space: normal; }
  tr.flagged td:last-child { min-width: 0; }
  details { break-before: auto; }
  details::details-content { content-visibility: visible; block-size: auto; }
  #tip { display: none; }
  * { -webkit-print-color-adjust: exact; print-color-adjust: exact; }
}
"""

# A mark's own <title> answers a mouse after a second; this answers at once, and a finger as well.
SCRIPT = """
const tip = Object.assign(document.createElement('div'), {id: 'tip', hidden: true});
document.body.append(tip);
function show(event) {
  const mark = event.target.closest('.tip');
  tip.hidden = !mark;
  if (!mark) return;
  tip.textContent = mark.dataset.tip;
  const x = Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 8);
  const above = event.clientY - tip.offsetHeight - 12;
  tip.style.left = Math.max(8, x) + 'px';
  tip.style.top = (above < 8 ? event.clientY + 16 : above) + 'px';
}
for (const kind of ['pointermove', 'pointerdown']) document.addEventListener(kind, show);
addEventListener('beforeprint', () => document.querySelectorAll('details').forEach(d => d.open = true));
"""
