// The order of search results. Sphinx distinguishes only words in titles from words in texts, and then sorts by name.
// Here pages with the words in their title come first, then classes and functions of that name, then pages with a heading
// about it, then all others. Of similar results, those of the sections listed here come first.
const SECTIONS = { explanation: 5, tutorials: 4, bugs: 3, "how-to": 2, reference: 1, contributing: -1 };
const QUERY = (new URLSearchParams(window.location.search).get("q") ?? "").toLowerCase();

var Scorer = {
  score: ([page, title, , , score, , kind]) => {
    const words = QUERY.split(/\s+/).filter(Boolean);
    const name = title.toLowerCase();
    if (kind === "object") return score + (words.includes(name.split(".").at(-1)) ? 10 : 0);
    const isAbout = words.every((word) => name.includes(word));
    return score + (isAbout ? 20 : 0) + (SECTIONS[page.split("/")[0]] ?? 0);
  },

  // Sphinx's own numbers, which it does not merge with these.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
