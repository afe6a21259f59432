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
