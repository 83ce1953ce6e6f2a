// Looks at the built site from inside of a browser, and tells the test what it saw.
const told = new URLSearchParams(location.search);

function until(found, seconds = 20) {
  const end = Date.now() + 1000 * seconds;
  return new Promise((resolve) => {
    (function look() {
      const seen = found();
      if (seen || Date.now() > end) resolve(seen || null);
      else setTimeout(look, 50);
    })();
  });
}

// The results that a page shows for some words, as { link, title }.
async function search(view, words) {
  const page = view.document;
  const field = await until(() => page.querySelector("[data-md-component=search-query]"));
  field.focus();
  field.value = words;
  field.dispatchEvent(new view.Event("keyup", { bubbles: true }));
  field.dispatchEvent(new view.Event("input", { bubbles: true }));
  await until(() => page.querySelector("a.md-search-result__link"));
  return [...page.querySelectorAll("a.md-search-result__link")].map((each) => ({
    link: each.getAttribute("href"),
    title: each.querySelector("h1, h2").textContent,
  }));
}

function frame(width) {
  const made = document.createElement("iframe");
  Object.assign(made, { width, height: 700 });
  document.body.append(made);
  return made;
}

function open(made, url) {
  return new Promise((resolve) => {
    made.onload = () => resolve(made.contentWindow);
    made.src = url;
  });
}

function follow(made, link) {
  return new Promise((resolve) => {
    made.onload = () => resolve(made.contentWindow);
    link.click();
  });
}

function luminance(colour) {
  const parts = colour.match(/[\d.]+/g).slice(0, 3).map((each) => each / 255);
  const linear = parts.map((each) => (each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4));
  return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2];
}

// The least between a text and what is behind it, once the colours have changed.
async function contrast(view, scheme) {
  const body = view.document.body;
  body.setAttribute("data-md-color-scheme", scheme);
  await new Promise((resolve) => setTimeout(resolve, 1000));
  const seen = [".md-typeset p", ".md-typeset p a", ".md-typeset table td", ".md-typeset pre code"].map((each) => {
    const part = view.document.querySelector(`.md-content ${each}`);
    let behind = part;
    while (/rgba?\(.*, 0\)$|transparent/.test(view.getComputedStyle(behind).backgroundColor)) behind = behind.parentElement;
    const both = [view.getComputedStyle(part).color, view.getComputedStyle(behind).backgroundColor].map(luminance);
    return (Math.max(...both) + 0.05) / (Math.min(...both) + 0.05);
  });
  return Math.min(...seen);
}

async function look() {
  const wide = frame(1280);
  let view = await open(wide, "index.html");
  const seen = { steps: [], widths: {} };
  seen.contrast = { light: await contrast(view, "default"), dark: await contrast(view, "slate") };
  for (const text of JSON.parse(told.get("path"))) {
    const links = [...view.document.querySelectorAll("nav a, .md-content a")];
    const link = links.find((each) => each.textContent.trim() === text);
    view = await follow(wide, link);
    seen.steps.push([text, view.location.pathname, view.document.querySelector("h1").textContent]);
  }
  const entry = view.document.querySelector(`.md-nav--secondary a[href$="${told.get("anchor")}"]`);
  entry.click();
  await until(() => view.scrollY > 0, 5);
  seen.anchor = view.document.querySelector(told.get("anchor")).getBoundingClientRect().top;
  seen.found = await search(view, told.get("words"));
  const pages = JSON.parse(told.get("pages"));
  async function measure(narrow) {
    for (let page = pages.pop(); page; page = pages.pop()) {
      const inside = await open(narrow, page);
      seen.widths[page] = [inside.document.documentElement.scrollWidth, inside.innerWidth];
    }
  }
  await Promise.all([1, 2, 3].map(() => measure(frame(400))));
  return seen;
}

addEventListener("load", async () => {
  let seen;
  try {
    seen = told.get("pages") ? await look() : { found: await search(window, told.get("words")) };
  } catch (error) {
    seen = { error: `${error.stack}` };
  }
  await fetch(told.get("to"), { method: "POST", mode: "no-cors", body: JSON.stringify(seen) });
});
