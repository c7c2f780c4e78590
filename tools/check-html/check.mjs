// Open HTML pages in headless Chromium, wide and narrow, light and dark, and print what is wrong with them.
//
//   node check.mjs [--screenshots FOLDER] REPORT.html|ADDRESS…
//
// Prints a line of JSON for each: bytes, requests beyond the file itself, or to another host than the page's, errors on the
// console, what axe finds, of each view, how far the page is wider than the window, what looks wrong (see `looks`), and its
// status: 0 all well, 1 a request, an error, a serious fault or a page that is too wide or looks wrong. Exit status 3 if there is no Chromium. FOLDER receives pictures of the
// views. `npm ci` in this folder fetches what is needed; the variable CHROMIUM names another browser than the one that comes with
// it. check.py does all this.

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";
import { parseArgs } from "node:util";

import bundled from "@sparticuz/chromium";
import { chromium } from "playwright-core";

const { values, positionals: pages } = parseArgs({ allowPositionals: true, options: { screenshots: { type: "string" } } });
const axe = readFileSync(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");

let browser;
try {
  browser = await chromium.launch({
    executablePath: process.env.CHROMIUM ?? (await bundled.executablePath()),
    args: ["--no-sandbox"], // in a container there is none; the page is ours
  });
} catch (error) {
  console.error(`Chromium does not start here: ${error.message.split("\n")[0]}`);
  process.exit(3);
}

const LAPTOP = 1366; // just wide enough for two side bars
const WIDTHS = [LAPTOP, 1280, 400]; // the last is a phone

// What looks wrong on a page, in a list of sentences. It runs in the page.
async function looks({ isDark, allowsPython }) {
  const wrong = [];
  const text = [...document.querySelectorAll("table")].map((table) => table.innerText).join("\n");
  const typographic = text.match(/[\u2018\u2019\u201c\u201d]|(?<=^|\s)[\u2013\u2014](?=[a-z])/m);
  if (typographic) wrong.push(`${typographic[0]} in a table: such an option cannot be copied`);
  if (!allowsPython && document.querySelector(".highlight-default"))
    wrong.push("a block without a language is highlighted as Python");
  for (const picture of isDark ? document.querySelectorAll("img") : []) {
    if (!picture.naturalWidth || !picture.offsetParent) continue; // not loaded, or of the light page
    const canvas = Object.assign(document.createElement("canvas"), { width: 8, height: 8 });
    const context = canvas.getContext("2d");
    context.drawImage(picture, 0, 0, 8, 8);
    const [red, green, blue, alpha] = context.getImageData(0, 0, 1, 1).data;
    if (alpha > 200 && Math.min(red, green, blue) > 200) wrong.push(`a white picture on a dark page: ${picture.alt}`);
  }
  const results = [...document.querySelectorAll("#search-results li a")].map((link) => link.getAttribute("href"));
  if (results.some((link) => link.startsWith("source/"))) wrong.push("a search finds sources");
  if (results.length && !results[0].startsWith("explanation/")) wrong.push("a search does not begin with an explanation");
  for (const section of document.querySelectorAll(".sidebar-tree > ul > li > ul")) {
    const links = section.children.length;
    if (links > 20) wrong.push(`${links} links without groups in the sidebar`);
  }
  return wrong;
}

async function check(page) {
  const isSite = page.startsWith("http:");
  const address = isSite ? page : pathToFileURL(resolve(page)).href;
  const bytes = isSite ? 0 : readFileSync(page).length;
  const found = { page, bytes, browser: browser.version(), requests: [], errors: [], violations: [], views: [], looks: [] };
  const allowsPython = address.includes("/reference/api/"); // examples of docstrings
  for (const colorScheme of ["light", "dark"]) {
    for (const width of WIDTHS) {
      const context = await browser.newContext({ viewport: { width, height: 900 }, colorScheme });
      const tab = await context.newPage();
      tab.on("request", (request) => {
        const isOwn = isSite ? new URL(request.url()).host === new URL(address).host : request.url() === address;
        if (!isOwn && !request.url().startsWith("data:")) found.requests.push(request.url());
      });
      tab.on("console", (message) => {
        if (["error", "warning"].includes(message.type())) found.errors.push(message.text());
      });
      tab.on("pageerror", (error) => found.errors.push(String(error)));
      await tab.goto(address, { waitUntil: address.includes("?") ? "networkidle" : "load" }); // a search fetches its index
      const overflow = await tab.evaluate(() => document.documentElement.scrollWidth - window.innerWidth);
      const view = `${width}-${colorScheme}`;
      const picture = (what) => {
        const name = `${new URL(address).pathname.slice(1).replace(/\.html$/, "").replaceAll("/", "-")}-${view}${what}.png`;
        const path = resolve(values.screenshots, name);
        return tab.screenshot({ path }).catch(() => tab.screenshot({ path })); // the first may fail on a busy machine
      };
      if (values.screenshots) await picture("");
      await tab.evaluate(() => document.querySelectorAll("details").forEach((details, i) => (details.open ||= i < 3)));
      if (values.screenshots && !isSite) {
        await tab.evaluate(() => document.querySelector("details[open] > div")?.scrollIntoView());
        await picture("-case");
      }
      for (const what of await tab.evaluate(looks, { isDark: colorScheme === "dark", allowsPython }))
        found.looks.push(`${what} (${view})`);
      await tab.evaluate(() => document.getAnimations().forEach((animation) => animation.cancel())); // colors that still fade in
      await tab.evaluate(axe);
      // A laptop's window has the texts and colors of the next one: axe would only take its time again.
      const run = () => axe.run(document, { resultTypes: ["violations"] });
      const result = width === LAPTOP ? { violations: [], passes: [] } : await tab.evaluate(run);
      for (const { id, impact, nodes } of result.violations) {
        const first = { first: nodes[0].html.slice(0, 200), why: nodes[0].failureSummary };
        found.violations.push({ view, id, impact, elements: nodes.length, ...first });
      }
      found.views.push({ view, overflow, passes: result.passes.length });
      await context.close();
    }
  }
  const serious = found.violations.filter(({ impact }) => ["serious", "critical"].includes(impact));
  const wide = found.views.filter(({ overflow }) => overflow > 0);
  const isWrong = [found.requests, found.errors, found.looks, serious, wide].some((list) => list.length);
  return { ...found, status: isWrong ? 1 : 0 };
}

for (const page of pages) console.log(JSON.stringify(await check(page)));
await browser.close();
