// The same as report.py, for clients of Node: reports a line of JSON on stdout for each thing that was tried.

export const CASE = JSON.parse(process.argv[2]);
export const MESSAGES = [{ role: "user", content: CASE.question }];
export const TOOL_SCHEMA = {
  type: "object",
  properties: { capital: { type: "string" } },
  required: ["capital"],
  additionalProperties: false,
};
const REFUSALS = [400, 404, 501];

// isToCome: Octavo does not have it yet, so it may be refused.
export async function trying(what, tried, { isToCome = false } = {}) {
  try {
    await tried();
    say(what, "works", "");
  } catch (error) {
    const status = error.status ?? error.statusCode ?? error.cause?.statusCode;
    const isRefusal = isToCome && REFUSALS.includes(status);
    const body = error.responseBody ? ` ${error.responseBody}` : "";
    say(what, isRefusal ? "refused" : "fails", `${error.name}: ${error.message}${body}`);
  }
}

export function same(seen, expected) {
  const [shown, wanted] = [JSON.stringify(seen), JSON.stringify(expected)];
  if (shown !== wanted) throw new Error(`${shown}, not ${wanted}`);
}

export function check(isSo, otherwise) {
  if (!isSo) throw new Error(String(otherwise));
}

function say(what, result, said) {
  console.log(JSON.stringify({ what, result, said }));
}
