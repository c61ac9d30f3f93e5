// Requests to the hub with the user's session.

const root = document.querySelector(".gpuhub-page");
export const hubUrl = root.dataset.gpuhubUrl;

async function readAnswer(response) {
  const answer = await response.json().catch(() => ({}));
  if (!response.ok) {
    throw Object.assign(new Error(answer.message || "The request failed: reload the page."), { status: response.status });
  }
  return answer;
}

export async function get(path) {
  const response = await fetch(hubUrl + path, { headers: { Accept: "application/json" }, credentials: "same-origin" });
  if (response.status === 403 && response.redirected === false && !response.headers.get("Content-Type")?.includes("json")) {
    window.location.reload(); // the session has ended: the page leads to the login
  }
  return readAnswer(response);
}

export async function post(path, body) {
  const response = await fetch(`${hubUrl}${path}?_xsrf=${encodeURIComponent(window.jhdata.xsrf_token)}`, {
    method: "POST",
    credentials: "same-origin",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
  if (response.status !== 204) { await readAnswer(response); }
}
