// Make one decision, and go on with it after whatever happened: main.js WORK_FILE OPERATION FACTS_JSON.
import { join } from "node:path";
import type { ServiceError } from "@grpc/grpc-js";
import { begin, connect, finish, retryAfter } from "./decide";
import { DecisionStatus, decisionStatusToJSON } from "./generated/decideonce/v1/decision_service";

const WITHIN_S = 60;
// sysexits.h: a temporary failure, try again.
const EX_TEMPFAIL = 75;

/** Print the outcome, and give an exit code: EX_TEMPFAIL where the same command is to be run again. */
async function main(workFile: string, operation: string, facts: string): Promise<number> {
  const request = begin(workFile, operation, JSON.parse(facts));
  const client = connect(join(__dirname, "../service_config.json"));
  try {
    const answer = await finish(client, process.env.DECIDEONCE_TOKEN ?? "", request, WITHIN_S);
    if (answer.status === DecisionStatus.DECISION_STATUS_SUCCEEDED) {
      console.log(answer.decision?.outcome, answer.provenance?.decisionId);
      return 0;
    }
    console.error(decisionStatusToJSON(answer.status), answer.failure?.reason ?? "");
    return [DecisionStatus.DECISION_STATUS_PROCESSING, DecisionStatus.DECISION_STATUS_FAILED_RETRYABLE].includes(
      answer.status,
    )
      ? EX_TEMPFAIL
      : 1;
  } catch (error) {
    console.error((error as Error).message);
    return retryAfter(error as ServiceError) === undefined ? 1 : EX_TEMPFAIL;
  } finally {
    client.close();
  }
}

const [workFile, operation, facts] = process.argv.slice(2);
main(workFile, operation, facts).then((code) => {
  process.exitCode = code;
});
