// The API key of this tab: asked for where the server wants one, sent with every call, and in a cookie for what
// elements fetch by themselves. It is never part of an address.

const STORE = "h3stream-key";
const $ = (id) => document.getElementById(id);

let current = stored();
let waiting = [];

function stored() {
  try {
    return sessionStorage.getItem(STORE) ?? "";
  } catch {
    return "";
  }
}

function store(key) {
  current = key;
  try {
    if (key) sessionStorage.setItem(STORE, key);
    else sessionStorage.removeItem(STORE);
  } catch {
    // A browser may keep nothing for pages: then a reload asks again.
  }
}

export const headersOf = (key = current) => (key ? { Authorization: `Bearer ${key}` } : {});

// Asks for a key and says why; ends once there is one that the server takes.
export function askForKey(why) {
  $("key-problem").textContent = why;
  $("key-form").hidden = false;
  return new Promise((resolve) => waiting.push(resolve));
}

function taken(key) {
  store(key);
  $("key").value = "";
  $("key-form").hidden = true;
  $("forget-key").hidden = !key;
  waiting.forEach((resolve) => resolve());
  waiting = [];
}

// openSession(key), closeSession(): of the gateway; the first fails with an error in words.
export async function startKeys(openSession, closeSession) {
  $("key-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const key = $("key").value.trim();
    if (!key) return;
    try {
      await openSession(key);
      taken(key);
    } catch (error) {
      $("key-problem").textContent = error.message;
      $("key").focus();
    }
  });
  $("forget-key").addEventListener("click", async () => {
    store("");
    await closeSession().catch(() => {}); // the tab has forgotten it all the same
    location.reload();
  });
  $("forget-key").hidden = !current;
  if (current) await openSession(current).catch(() => {}); // what is wrong, the first call tells
}
