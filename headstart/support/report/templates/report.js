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

// The replay: the passes of two runs, shown up to the time of the slider, and the tree of the current pass.
for (const place of document.querySelectorAll('.replay')) {
  const replays = JSON.parse(place.querySelector('script').textContent);
  const make = (tag, css, text) => Object.assign(document.createElement(tag), {className: css ?? '', textContent: text ?? ''});
  const choice = (label, names) => {
    const select = make('select');
    select.setAttribute('aria-label', label);
    names.forEach(name => select.add(new Option(name)));
    return select;
  };
  const bar = make('div', 'controls');
  const play = make('button', '', 'Play');
  const slider = Object.assign(make('input'), {type: 'range', min: 0, step: 'any'});
  slider.setAttribute('aria-label', 'time');
  const slower = choice('speed', ['recorded time', '2 x slower', '5 x slower', '20 x slower']);
  const prompts = choice('prompt', replays.map(one => one.title));
  const heads = choice('heads', []);
  bar.append(play, slider, slower, prompts, heads);
  const sides = make('div', 'sides');
  const tree = make('div', 'scroll');
  const caption = make('p', 'soft');
  place.append(bar, sides, tree, caption);
  let runs = [], end = 0, now = 0, ticking = false, drawn = null;

  const draw = pass => {
    if (pass === drawn) return;
    drawn = pass;
    tree.replaceChildren(...(pass?.tree ? [picture(pass.tree)] : [make('p', 'soft', 'This pass verified no drafts.')]));
  };
  const show = time => {
    now = Math.min(Math.max(time, 0), end);
    slider.value = now;
    for (const run of runs) {
      const last = run.passes.findLastIndex(pass => pass.at <= now);
      run.spans.forEach((span, i) => { span.hidden = i > last; span.classList.toggle('now', i === last); });
      const tokens = run.passes.slice(0, last + 1).reduce((sum, pass) => sum + pass.tokens.length, 0);
      const passed = Math.min(now, run.passes.at(-1).at);
      const rate = passed > 0 ? (tokens / passed).toFixed(1) : '0';
      run.count.textContent = `${tokens} tokens in ${Math.max(last, 0)} passes, ${passed.toFixed(2)} s, ${rate} tokens/s`;
      if (run === runs[1]) {
        const pass = run.passes[last];
        draw(pass);
        caption.textContent = !pass?.tree ? '' : `Pass ${last}: ${pass.tree.kinds.length - 1} nodes verified, `
          + `${pass.tokens.length} ${pass.tokens.length === 1 ? 'token' : 'tokens'} written, the backbone's own included.`;
      }
    }
  };
  const load = () => {
    const one = replays[prompts.selectedIndex];
    runs = [one.runs[0], one.runs[1 + Math.max(heads.selectedIndex, 0)]].map(run => {
      const side = make('div', 'side');
      const text = make('div', 'text');
      const spans = run.passes.map((pass, i) => make('span', `pass p${i % 4}`, pass.tokens.join('')));
      const count = make('p', 'soft');
      text.append(make('span', 'prompt', one.prompt), ...spans);
      side.append(make('b', '', run.name), count, text);
      return {...run, side, spans, count};
    });
    sides.replaceChildren(...runs.map(run => run.side));
    end = Math.max(...runs.map(run => run.passes.at(-1).at));
    slider.max = end;
    drawn = null;
    const highest = Math.max(0, ...runs[1].passes.map(pass => pass.tree ? Math.max(...pass.tree.rows) + 1 : 0));
    tree.style.minHeight = `${34 * highest}px`;   // what is below stays where it is
    const widest = runs[1].passes.filter(pass => pass.tree).sort((a, b) => b.tokens.length - a.tokens.length)[0];
    show(widest ? widest.at : runs[1].passes.at(-1).at);   // at rest, the pass that wrote most
  };
  const tick = (before, after) => {
    if (!ticking) return;
    show(now + (after - before) / 1000 / [1, 2, 5, 20][slower.selectedIndex]);
    if (now >= end) stop(); else requestAnimationFrame(next => tick(after, next));
  };
  const stop = () => { ticking = false; play.textContent = 'Play'; };
  play.addEventListener('click', () => {
    if (ticking) return stop();
    if (now >= end || play.dataset.fresh !== 'no') show(0);
    play.dataset.fresh = 'no';
    ticking = true;
    play.textContent = 'Pause';
    requestAnimationFrame(first => tick(first, first));
  });
  slider.addEventListener('input', () => { stop(); play.dataset.fresh = 'no'; show(Number(slider.value)); });
  const pick = () => {
    const kept = Math.max(heads.selectedIndex, 0);
    heads.replaceChildren();
    replays[prompts.selectedIndex].runs.slice(1).forEach(run => heads.add(new Option(run.name)));
    heads.selectedIndex = Math.min(kept, heads.options.length - 1);
    stop();
    play.dataset.fresh = '';
    load();
  };
  prompts.addEventListener('change', pick);
  heads.addEventListener('change', () => { stop(); play.dataset.fresh = ''; load(); });
  pick();
}

// Boxes and curves as in headstart/support/report/tree.py.
function picture(tree) {
  const [character, padding, row, box, gap] = [8, 18, 34, 24, 28];
  const parsed = document.createElement('div');
  parsed.innerHTML = '<svg/>';
  const make = (tag, css, values) => {
    const one = document.createElementNS(parsed.firstChild.namespaceURI, tag);
    if (css) one.setAttribute('class', css);
    for (const [name, value] of Object.entries(values)) one.setAttribute(name, value);
    return one;
  };
  const levels = [0], widths = [];
  const wide = tree.labels.map(label => [...label].length * character + padding);
  for (let i = 1; i < tree.above.length; i++) levels.push(levels[tree.above[i]] + 1);
  levels.forEach((level, i) => { widths[level] = Math.max(widths[level] ?? 0, wide[i]); });
  const left = widths.map((_, level) => 2 + widths.slice(0, level).reduce((sum, one) => sum + one + gap, 0));
  const x = i => left[levels[i]], y = i => 2 + row * tree.rows[i];
  const width = left.at(-1) + widths.at(-1) + 2, height = row * Math.max(...tree.rows) + box + 4;
  const svg = make('svg', 'tree', {viewBox: `0 0 ${width} ${height}`, width, role: 'img'});
  svg.style.width = `${width}px`;
  for (let i = 1; i < levels.length; i++) {
    const parent = tree.above[i], x1 = x(parent) + wide[parent], y1 = y(parent) + box / 2, y2 = y(i) + box / 2, mid = (x1 + x(i)) / 2;
    svg.append(make('path', tree.kinds[i], {d: `M${x1} ${y1}C${mid} ${y1} ${mid} ${y2} ${x(i)} ${y2}`}));
  }
  tree.labels.forEach((label, i) => {
    const text = make('text', tree.kinds[i], {x: x(i) + wide[i] / 2, y: y(i) + 16, 'text-anchor': 'middle'});
    text.textContent = label;
    svg.append(make('rect', tree.kinds[i], {x: x(i), y: y(i), width: wide[i], height: box, rx: 6}), text);
  });
  return svg;
}
