"""The look of a report, and the few lines of script that show one panel of several. Without the script all panels are shown."""

CSS = """
:root {
  color-scheme: light dark;
  --page: #fbfbfa; --card: #fff; --ink: #1d2126; --soft: #5d6670; --rule: #e3e5e8; --grid: #eceef0; --bar: #d5dae1;
  --good: #1b7f4d; --bad: #b3261e; --base: #8a94a0; --run: 37 99 201;
  --h0: #2563c9; --h1: #d06a00; --h2: #13876a; --h3: #b23a86; --h4: #6d4fc7; --h5: #94700a;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #14171a; --card: #1b1f24; --ink: #e6e9ec; --soft: #9aa4af; --rule: #2d333a; --grid: #272c32; --bar: #353d47;
    --good: #5bd198; --bad: #ff8a80; --base: #8b96a3; --run: 111 168 255;
    --h0: #6fa8ff; --h1: #ffa94d; --h2: #4fd0a6; --h3: #f08bc6; --h4: #b49cff; --h5: #e0c04c;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0 auto; max-width: 1120px; padding: 32px 24px 64px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif;
}
h1 { font-size: 24px; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 0 0 2px; }
p { margin: 4px 0 12px; }
.soft { color: var(--soft); font-size: 13.5px; }
.verdict { font-weight: 600; color: var(--good); }
.verdict.bad { color: var(--bad); }
section { background: var(--card); border: 1px solid var(--rule); border-radius: 10px; padding: 18px 20px; margin-top: 20px; min-width: 0; }
.charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(460px, 100%), 1fr)); gap: 20px; margin-top: 20px; }
.charts > section { margin-top: 0; }

.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-size: 13px; font-variant-numeric: tabular-nums; }
th { text-align: right; font-weight: 600; color: var(--soft); border-bottom: 1px solid var(--rule); padding: 6px; }
td { text-align: right; padding: 5px 6px; border-bottom: 1px solid var(--grid); white-space: nowrap; }
th.l, td.l { text-align: left; }
tr.head td.l { font-weight: 600; }
tr.base td { color: var(--soft); }
tr.first td { border-top: 2px solid var(--rule); }
pre { overflow-x: auto; margin: 4px 0; font: 13px/1.5 ui-monospace, "SF Mono", Menlo, "DejaVu Sans Mono", monospace; }
td.heat { background: rgb(var(--run) / calc(var(--v) * 55%)); text-align: center; min-width: 44px; }

figure { margin: 8px 0 0; }
svg { width: 100%; height: auto; display: block; }
figure svg { max-width: 720px; }
svg text { font-size: 12px; fill: var(--soft); }
.grid { stroke: var(--grid); }
.bar { fill: var(--bar); }
.base { --c: var(--base); }
.h0 { --c: var(--h0); }
.h1 { --c: var(--h1); }
.h2 { --c: var(--h2); }
.h3 { --c: var(--h3); }
.h4 { --c: var(--h4); }
.h5 { --c: var(--h5); }
.legend { display: flex; flex-wrap: wrap; gap: 4px 16px; font-size: 13px; }
.key i { display: inline-block; width: 18px; margin-right: 6px; border-top: 3px solid var(--c); vertical-align: middle; }
.key.dashed i { border-top-style: dashed; }
.series polyline { fill: none; stroke: var(--c); stroke-width: 2; stroke-linejoin: round; }
.series.dashed polyline { stroke-dasharray: 5 4; }
.series circle { fill: var(--c); stroke: var(--card); stroke-width: 1.5; }
svg.strip { height: 44px; margin: 6px 0 12px; }
.strip rect { fill: var(--c); }

.panel + .panel { margin-top: 20px; }
select { font: inherit; margin: 4px 0 8px; max-width: 100%; }
.picked > .panel > p:first-child { display: none; }
.text {
  font: 13.5px/1.75 ui-monospace, "SF Mono", Menlo, "DejaVu Sans Mono", monospace;
  white-space: pre-wrap; overflow-wrap: anywhere; border-left: 3px solid var(--rule); padding-left: 12px;
}
.prompt { color: var(--soft); }
.run { background: rgb(var(--run) / calc(var(--n) * 8%)); border-radius: 4px; box-shadow: inset 0 -2px 0 rgb(var(--run) / 55%); }
.run.one { background: none; box-shadow: none; }
.run:hover { outline: 2px solid rgb(var(--run)); }
.run b { font-weight: inherit; }
.run b + b { border-left: 1px dotted rgb(var(--run) / 70%); }
"""

SCRIPT = """
for (const group of document.querySelectorAll('.panels')) {
  const panels = [...group.querySelectorAll('.panel')];
  if (panels.length < 2) continue;
  const select = document.createElement('select');
  select.setAttribute('aria-label', 'which to show');
  for (const panel of panels) select.add(new Option(panel.dataset.name));
  const show = () => panels.forEach((panel, i) => panel.hidden = i !== select.selectedIndex);
  select.addEventListener('change', show);
  group.classList.add('picked');
  group.prepend(select);
  show();
}
"""
